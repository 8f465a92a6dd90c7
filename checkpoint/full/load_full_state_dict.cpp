#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/full_state_dict.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/prepared_load.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/text.h>

#include "checkpointer/peers.h"
#include "full/whole_tensors.h"
#include "tensors/write_tensors.h"

namespace ddp {
namespace {

constexpr const char* kLoadFullStateDict = "load_full_state_dict";

std::string load_text(const std::vector<NamedKind>& tensors) {
  std::vector<ShardLayout> layouts;
  for (const auto& [name, kind] : tensors) layouts.push_back({name, kind, whole_box(kind.sizes)});
  return to_text(RankLayouts{{"", layouts}});
}

std::vector<NamedKind> tensors_in_load_text(const std::string& text) {
  std::vector<NamedKind> tensors;
  auto layouts = layouts_from(text);
  for (auto& layout : layouts[""]) tensors.push_back({layout.name, std::move(layout.kind)});
  return tensors;
}

/// Maps names in the file to the elements that this rank needs.
struct FullLoad {
  OwnParts own;
  WholeTensors whole;
  std::vector<NamedKind> loaded;  // rank 0's
  std::vector<size_t> sources;    // the loaded tensor's number, of each of `whole`
};

/// Finds a loaded tensor for each of the model's. \throws c10::ValueError  on any difference.
std::vector<size_t> match_tensors(
    const WholeTensors& whole, const std::vector<NamedKind>& loaded, const std::string& subject,
    const std::string& source) {
  std::unordered_map<std::string, size_t> number;
  for (size_t i = 0; i < loaded.size(); ++i) number.emplace(loaded[i].name, i);
  constexpr auto kNone = static_cast<size_t>(-1);
  std::vector<size_t> sources(whole.tensors.size(), kNone);
  std::set<std::string> known;
  for (const auto& [name, tensor] : whole.names) {
    known.insert(name);
    const auto found = number.find(name);
    if (found != number.end() && sources[tensor] == kNone) sources[tensor] = found->second;
  }
  std::vector<std::string> missing, additional;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == kNone) missing.push_back(whole.tensors[i].name);
  }
  for (const auto& tensor : loaded) {
    if (known.count(tensor.name) == 0) additional.push_back(tensor.name);
  }
  auto problem = lacking_names("the model", source, missing, additional);
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == kNone) continue;
    const auto& [name, kind] = whole.tensors[i];
    const auto& sizes = loaded[sources[i]].kind.sizes;
    if (sizes == kind.sizes) continue;
    problem += ddp::str(
        problem.empty() ? "" : "; ", '"', name, "\" is ", at::IntArrayRef(kind.sizes),
        " in the model and ", at::IntArrayRef(sizes), " in ", source);
  }
  DDP_CHECK_VALUE(
      problem.empty(), subject, ": expected the model's names and shapes, but ", problem,
      ". Build the model as it was saved.");
  return sources;
}

std::unordered_map<std::string, size_t> numbers_of(const WholeTensors& whole) {
  std::unordered_map<std::string, size_t> numbers;
  for (size_t i = 0; i < whole.tensors.size(); ++i) numbers.emplace(whole.tensors[i].name, i);
  return numbers;
}

/// A tensor of several names goes by the first of them on the first rank that has the tensor.
///
/// \throws c10::ValueError  another name of it is the first on another rank.
void check_first_names(const WholeTensors& whole) {
  const auto numbers = numbers_of(whole);
  for (size_t rank = 0; rank < whole.ranks.size(); ++rank) {
    for (const auto& shard : whole.ranks[rank]) {
      DDP_CHECK_VALUE(
          numbers.count(shard.name) == 1, kLoadFullStateDict,
          ": expected the names of a shared tensor in the same order on every rank, got \"",
          shard.name, "\" as the first on rank ", rank, " of ", whole.ranks.size(),
          " and as another on a rank before it. Register the modules that share it in the same "
          "order on every rank.");
    }
  }
}

/// Compares what is loaded with the whole model, on every rank.
///
/// \param loaded  this rank's text of it; "" where rank 0's alone counts.
/// \param subject, source  for the texts of errors, the same on all ranks.
FullLoad agree_on_load(
    const torch::nn::Module& module, const std::string& loaded, std::string problem,
    const std::string& subject, const std::string& source, const ProcessGroup& group,
    GroupMonitor& monitor) {
  FullLoad load;
  if (problem.empty()) {
    problem = problem_of([&] { load.own = own_parts_of(module, Values::ToLoad); });
  }
  const auto hash = loaded.empty() ? "" : std::to_string(fnv1a(loaded));
  // In a pretended job this rank's text may come back as that of rank 0.
  const bool gives_text = group->getRank() == 0 || (is_pretended() && !loaded.empty());
  const auto of_first = gives_text ? packed({subject, loaded}) : "";
  agree(
      packed({problem, hash, of_first, to_text(load.own)}), group, kLoadFullStateDict,
      [&](const std::vector<std::string>& by_rank) {
        const auto texts = texts_by_position<4>(by_rank);
        auto text = first_problem(texts[0]);
        if (!text.empty()) return text;
        const auto& hashes = texts[1];
        if (texts[2][0].empty()) {
          return ddp::str(
              kLoadFullStateDict, ": expected the dictionary on every rank of a pretended job, ",
              "whose rank 0 may not exist, got an empty one. Pass it on this rank, too.");
        }
        const auto of_rank_0 = unpacked(texts[2][0]);
        for (size_t rank = 1; rank < hashes.size() && !is_pretended(); ++rank) {
          if (hashes[rank].empty() || hashes[rank] == hashes[0]) continue;
          return ddp::str(
              kLoadFullStateDict, ": expected the same file on all ranks, but rank ", rank, " of ",
              hashes.size(), " sees other names or shapes than rank 0 in ", of_rank_0.at(0),
              ". Copy it to every host.");
        }
        return problem_of([&] {
          load.whole = whole_tensors(kLoadFullStateDict, texts[3]);
          check_first_names(load.whole);
          load.loaded = tensors_in_load_text(of_rank_0.at(1));
          load.sources = match_tensors(load.whole, load.loaded, of_rank_0.at(0), source);
        });
      },
      &monitor);
  return load;
}

}  // namespace

void load_full_state_dict(
    torch::nn::Module& module, const std::string& path, const GroupArg& given) {
  const c10::NoGradGuard no_grad;
  const auto group = given.get();
  const auto monitor = monitor_of(group);
  std::unique_ptr<TensorFile> file;
  const auto unreadable = problem_of([&] { file = open_tensor_file(path); });
  const auto load = agree_on_load(
      module, file ? load_text(file->tensors()) : "", unreadable, path, "the file", group,
      *monitor);

  // All is read before anything changes.
  std::vector<at::Tensor> values;
  const auto problem = problem_of([&] {
    const auto numbers = numbers_of(load.whole);
    for (const auto& part : load.own.parts) {
      values.push_back(file->read(load.sources[numbers.at(part.name)], part.box));
    }
  });
  agree(problem, group, kLoadFullStateDict, first_problem, monitor.get());
  for (size_t i = 0; i < values.size(); ++i) load.own.parts[i].view.copy_(values[i]);
}

void load_full_state_dict(
    torch::nn::Module& module, const torch::OrderedDict<std::string, at::Tensor>& dict,
    const GroupArg& given) {
  const c10::NoGradGuard no_grad;
  const auto group = given.get();
  const auto monitor = monitor_of(group);
  // A pretended rank takes its own for that of rank 0.
  const bool is_first = group->getRank() == 0;
  const bool has_dict = is_first || (is_pretended() && !dict.is_empty());
  TensorSource source;
  const auto problem = problem_of([&] {
    if (has_dict) source = source_of(dict, kLoadFullStateDict);
  });
  const auto load = agree_on_load(
      module, has_dict ? load_text(source.tensors) : "", problem, kLoadFullStateDict,
      "the dictionary", group, *monitor);

  std::vector<std::vector<const OwnPart*>> parts(load.whole.tensors.size());
  const auto numbers = numbers_of(load.whole);
  for (const auto& part : load.own.parts) parts[numbers.at(part.name)].push_back(&part);
  const auto sending = [] { return std::string("load_full_state_dict: sending the tensors"); };
  monitor->abort_on_error(sending, [&] {
    for (size_t i = 0; i < load.whole.tensors.size(); ++i) {
      const auto& kind = load.loaded[load.sources[i]].kind;
      const auto elements = c10::multiply_integers(kind.sizes);
      if (elements == 0) continue;
      const auto device = carrier_device(*group);
      auto memory = has_dict ? source.read(load.sources[i]).to(device).view({-1})
                             : at::empty({elements}, at::dtype(kind.dtype).device(device));
      if (has_dict && !is_first) memory = memory.clone();  // the caller's, and received
      auto bytes = memory.view(at::kByte);
      broadcast(bytes, /*src=*/0, group);
      const auto all = memory.view(kind.sizes);
      for (const auto* part : parts[i]) part->view.copy_(box_view(all, part->box));
    }
  });
}

}  // namespace ddp
