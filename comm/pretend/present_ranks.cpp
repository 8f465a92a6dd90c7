#include "pretend/present_ranks.h"

#include <algorithm>

#include <ddp/internal/check.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kPretendVariable = "DDP_PRETEND";
constexpr const char* kPretendRemedy =
    "Start the program with ddprun --pretend RANKS --ranks LIST, which sets it.";

thread_local int equal_messages = 0;

std::vector<int> parse_present(const Setting& setting, int world_size) {
  std::vector<int> present;
  for (size_t begin = 0; begin <= setting.value.size();) {
    const auto end = std::min(setting.value.find(',', begin), setting.value.size());
    present.push_back(parse_int(
        {kPretendVariable, setting.value.substr(begin, end - begin)}, {0, world_size - 1},
        kPretendRemedy));
    begin = end + 1;
  }
  DDP_CHECK_VALUE(
      std::adjacent_find(present.begin(), present.end(), std::greater_equal<>()) == present.end(),
      kPretendVariable, ": expected ascending ranks, each once, got \"", setting.value, "\". ",
      kPretendRemedy);
  return present;
}

}  // namespace

bool PretendedRank::is_present(int other) const {
  return std::binary_search(present.begin(), present.end(), other);
}

std::string PretendedRank::present_text() const { return joined_by(",", present); }

std::optional<PretendedRank> read_pretended_rank(const Lookup& lookup, int rank, int world_size) {
  const auto setting = read_variable(lookup, kPretendVariable);
  if (!setting) return std::nullopt;
  const auto environment = read_environment(lookup);
  const auto number = [&](int given, const std::optional<Setting>& variable,
                          const std::string& name, int min) {
    if (given != -1) return given;
    DDP_CHECK_VALUE(
        variable, kPretendVariable, ": expected ", name,
        " in the environment beside it, got nothing. ", kPretendRemedy);
    return parse_int(*variable, {min}, kPretendRemedy);
  };
  PretendedRank pretended;
  pretended.world_size = number(world_size, environment.world_size, "WORLD_SIZE", 1);
  pretended.rank = number(rank, environment.rank, "RANK", 0);
  pretended.present = parse_present(*setting, pretended.world_size);
  DDP_CHECK_VALUE(
      pretended.is_present(pretended.rank), kPretendVariable, ": expected this process's rank, ",
      pretended.rank, " of ", pretended.world_size, ", in the list, got \"", setting->value, "\". ",
      kPretendRemedy);
  return pretended;
}

bool is_pretended() { return read_variable(process_variable, kPretendVariable).has_value(); }

EqualMessages::EqualMessages(const at::Tensor& received, const at::Tensor& sent) {
  if (is_pretended()) received.copy_(sent);
  ++equal_messages;
}
EqualMessages::~EqualMessages() { --equal_messages; }
bool EqualMessages::are_expected() { return equal_messages > 0; }

void check_not_pretended(const char* subject, const char* remedy) {
  DDP_CHECK(
      !is_pretended(), subject, ": expected ranks that are processes, got a pretended job (",
      kPretendVariable, "), whose other ranks do not exist. ", remedy);
}

}  // namespace ddp
