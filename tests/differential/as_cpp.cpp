// Prints a program as the C++ that its rank 0 ran: a test on threads, with the sums that one
// process has.
#include <fstream>
#include <iomanip>
#include <set>
#include <sstream>

#include "differential/run.h"
#include "differential/worker.h"

namespace ddp::differential {
namespace {

const char* const kHead = R"(#include <cmath>
#include <unistd.h>

#include <ddp/ddp.h>
#include <ddp/fully_sharded.h>
#include <ddp/functional.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

)";

/// Breaks the preprocessor's one line into statements. A brace with a blank after it opens a block.
std::string laid_out(const std::string& code, size_t depth = 0) {
  std::string result, line;
  std::vector<bool> blocks;  // of the open braces
  int parentheses = 0;
  bool quoted = false;
  const auto flush = [&] {
    const auto first = line.find_first_not_of(' ');
    if (first != std::string::npos)
      result += std::string(2 * depth, ' ') + line.substr(first) + "\n";
    line.clear();
  };
  for (size_t i = 0; i < code.size(); ++i) {
    const char c = code[i], next = i + 1 < code.size() ? code[i + 1] : ' ';
    if (c == '"' && (i == 0 || code[i - 1] != '\\')) quoted = !quoted;
    if (quoted) {
      line += c;
      continue;
    }
    if (c == ' ' && !line.empty() && line.back() == '(') continue;
    parentheses += c == '(' ? 1 : c == ')' ? -1 : 0;
    const bool closes = c == '}' && !blocks.empty() && blocks.back();
    if (closes && parentheses == 0) flush(), depth -= depth > 0 ? 1 : 0;
    line += c;
    if (c == '{') blocks.push_back(next == ' ' && parentheses == 0);
    if (c == '{' && blocks.back()) flush(), ++depth;
    if (c == '}' && !blocks.empty()) blocks.pop_back();
    if (parentheses == 0 && (c == ';' || (closes && next == ' '))) flush();
  }
  flush();
  return result;
}

std::string as_comment(std::string text) {
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 3)
    text.replace(at, 1, "\n//");
  return text;
}

std::string digits(double value) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::setprecision(11) << (std::abs(value) < 1e-12 ? 0 : value);
  return text.str();
}

}  // namespace

std::string as_cpp(
    const Program& program, const std::vector<std::string>& lines, const Outcome& outcome) {
  std::string body;
  std::set<std::string> used;
  std::string types = laid_out(sources().at("values") + ";", 0) + "\n";
  types +=
      laid_out(sources().at("Layer") + ";") + "\n" + laid_out(sources().at("Net") + ";") + "\n";
  used = {"values", "Layer", "Net"};
  int open = 0;
  size_t phase = 0;
  std::vector<std::string> ranks;
  for (const auto& line : lines) {
    if (line.rfind("#use ", 0) == 0) {
      const auto name = line.substr(5);
      if (used.insert(name).second) types += laid_out(sources().at(name) + ";") + "\n";
    } else if (line.rfind("#ranks ", 0) == 0) {
      if (phase++ > 0) body += "  return {};\n}\n\n";
      body += "Sums train" + std::to_string(phase - 1) + "(Rank self) {\n";
      ranks.push_back(line.substr(7));
    } else {
      const int depth = std::max(0, open - (line[0] == '}' ? 1 : 0));
      body += line.rfind("//", 0) == 0 ? "  " + line + "\n"
                                       : laid_out(line, static_cast<size_t>(1 + depth));
      for (const char c : line) open += c == '{' ? 1 : c == '}' ? -1 : 0;
    }
  }
  body += std::string(static_cast<size_t>(std::max(0, open)), '}') + "\n";
  if (body.rfind("return sums;") == std::string::npos ||
      body.rfind("return sums;") < body.rfind("Sums train"))
    body += "  return {};\n";
  body += "}\n";
  std::string test = "TEST_CASE(\"differential: " + text_of(program) + "\") {\n";
  test += "  RanksOptions options;\n  options.backend = \"" + program.label("backend") + "\";\n";
  for (size_t i = 0; i < ranks.size(); ++i) {
    test += "  " + std::string(i + 1 < ranks.size() ? "" : "const auto sums = ") +
            "run_ranks<Sums>(" + ranks[i] + ", train" + std::to_string(i) + ", options);\n";
  }
  test += "  // One process has:\n  const Sums expected{";
  for (const auto& [name, value] : reference_sums(program))
    test += "\n      {\"" + name + "\", " + digits(value) + "},";
  test +=
      "};\n  for (const auto& own : sums) {\n    for (const auto& [name, value] : expected) {\n    "
      "  CAPTURE(name);\n";
  test += "      CHECK(std::abs(own.at(name) - value) <= " +
          std::string(program.has("precision") || program.has("hook") ? "1e-2" : "1e-9") +
          " * (1 + std::abs(value)));\n    }\n  }\n}\n";
  return "// clang-format off\n// " + text_of(program) + "\n" +
         (outcome.kind.empty() ? ""
                               : "// " + outcome.kind + ": " + as_comment(outcome.text) + "\n") +
         kHead +
         "namespace {\n\nusing namespace ddp;\nusing namespace ddp::testing;\nusing Sums = "
         "std::map<std::string, double>;\n\n" +
         (program.has("reload") ? "const TemporaryFolder checkpoints;\n\n" : "") + types + body +
         "\n" + test + "\n}  // namespace\n";
}

}  // namespace ddp::differential
