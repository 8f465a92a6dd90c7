// ddp_consolidate: one file of a part of a checkpoint, without ranks.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <limits>
#include <optional>
#include <string>

#include <c10/util/Exception.h>
#include <ddp/consolidate_checkpoint.h>
#include <ddp/version.h>
#include <CLI/CLI.hpp>

namespace {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;

constexpr const char* kDescription =
    "Writes one file of a part that ddp::Checkpointer has saved, however many ranks it was cut "
    "over.";

constexpr const char* kDetails = R"(
torch.load(FILE, weights_only=True) reads the file: a model's state_dict(), or an optimizer's. A
FILE that ends with .safetensors is such a file; a model's only.
Without --step it takes the newest checkpoint in which the part is whole, and says which ones it
left out. Needs memory of one tensor.

Exit code: 0 when the file is there; 2 bad usage; 1 else, as for a file that is damaged or missing.

Example:
  ddp_consolidate --folder checkpoints --output model.pt
)";

struct Arguments {
  std::string folder, output, part = "model";
  std::optional<int64_t> step;
};

/// Writes lines to stderr: of tensors one a second, since a model may have thousands.
class Progress {
 public:
  void operator()(const std::string& line) {
    const auto now = std::chrono::steady_clock::now();
    const bool is_tensor = line.rfind("writing ", 0) == 0;
    if (is_tensor && now < next_) return;
    if (is_tensor) next_ = now + std::chrono::seconds(1);
    std::fprintf(stderr, "ddp_consolidate: %s\n", line.c_str());
  }

 private:
  std::chrono::steady_clock::time_point next_;
};

int consolidate(const Arguments& arguments) {
  try {
    const auto step = ddp::consolidate_checkpoint(
        arguments.folder, arguments.step, arguments.output,
        ddp::ConsolidateOptions().part(arguments.part).progress(Progress()));
    std::fprintf(
        stderr, "ddp_consolidate: wrote %s of step %lld\n", arguments.output.c_str(),
        static_cast<long long>(step));
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "ddp_consolidate: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ddp_consolidate: %s\n", error.what());
  }
  return kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(kDescription, "ddp_consolidate");
  app.footer(kDetails);
  app.set_version_flag("--version", "ddp_consolidate " DDP_VERSION);
  app.add_option("--folder", arguments.folder, "The Checkpointer's folder")
      ->required()
      ->type_name("FOLDER");
  app.add_option("--step", arguments.step, "Which checkpoint. Default: the newest whole one")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->type_name("N");
  app.add_option("--part", arguments.part, "The name it was added under. Default: model")
      ->type_name("NAME");
  app.add_option("--output", arguments.output, "The file to write")->required()->type_name("FILE");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request, std::cout, std::cerr);
  } catch (const CLI::ParseError& error) {
    std::cerr << "ddp_consolidate: " << error.what()
              << "\nRun ddp_consolidate --help for more information.\n";
    return kBadUsage;
  }
  return consolidate(arguments);
}
