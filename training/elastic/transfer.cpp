#include "elastic/transfer.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/text.h>

#include "elastic/flat_state.h"

namespace ddp::elastic {
namespace {

constexpr int64_t kPieceBytes = int64_t{16} << 20;
constexpr int kTag = 0x454C;

/// The bytes of several tensors, one after the other. They stay where they are.
class ByteRun {
 public:
  explicit ByteRun(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      tensors_.push_back(bytes_of(tensor));
      size_ += tensors_.back().numel();
      is_on_device_ = is_on_device_ || !tensor.is_cpu();
    }
  }
  int64_t size() const { return size_; }
  bool is_on_device() const { return is_on_device_; }

  /// Calls `use(bytes, at)` for each part of a tensor within `count` bytes from `first` on, where
  /// `at` counts from `first`.
  template <typename Use>
  void visit(int64_t first, int64_t count, const Use& use) const {
    int64_t begin = 0;
    for (const auto& tensor : tensors_) {
      const auto end = begin + tensor.numel();
      const auto from = std::max(begin, first);
      const auto to = std::min(end, first + count);
      if (from < to) use(tensor.narrow(0, from - begin, to - from), from - first);
      begin = end;
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  int64_t size_ = 0;
  bool is_on_device_ = false;
};

/// One source's part of a run.
struct Stripe {
  int64_t begin;
  int64_t end;
};

Stripe stripe_of(int64_t bytes, size_t source, size_t sources) {
  const auto k = static_cast<int64_t>(sources);
  const auto i = static_cast<int64_t>(source);
  return {bytes / k * i + std::min(i, bytes % k), bytes / k * (i + 1) + std::min(i + 1, bytes % k)};
}

void send_stripe(
    const ByteRun& run, const Stripe& stripe, const std::vector<int>& receivers,
    const ProcessGroup& group) {
  const auto longest = std::min(kPieceBytes, stripe.end - stripe.begin);
  const auto piece = run.is_on_device() ? pinned_bytes(longest) : at::empty({longest}, at::kByte);
  TensorsOnHost copies;
  for (auto at = stripe.begin; at < stripe.end; at += kPieceBytes) {
    const auto count = std::min(kPieceBytes, stripe.end - at);
    run.visit(at, count, [&](const at::Tensor& from, int64_t to) {
      copies.copy_into(piece.narrow(0, to, from.numel()), from);
    });
    copies.wait();
    const auto message = piece.narrow(0, 0, count);
    std::vector<c10::intrusive_ptr<c10d::Work>> sent;
    for (const int rank : receivers) sent.push_back(send_async(message, rank, kTag, group));
    for (const auto& work : sent) work->wait();
  }
}

void receive_stripes(
    const ByteRun& run, const std::vector<int>& sources, const ProcessGroup& group) {
  std::vector<Stripe> stripes;
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < sources.size(); ++i) {
    stripes.push_back(stripe_of(run.size(), i, sources.size()));
    pieces.push_back(
        at::empty({std::min(kPieceBytes, stripes[i].end - stripes[i].begin)}, at::kByte));
  }
  for (int64_t at = 0; at < stripes.front().end; at += kPieceBytes) {
    std::vector<c10::intrusive_ptr<c10d::Work>> received(sources.size());
    std::vector<at::Tensor> messages(sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto count = std::min(kPieceBytes, stripes[i].end - stripes[i].begin - at);
      if (count <= 0) continue;
      messages[i] = pieces[i].narrow(0, 0, count);
      received[i] = recv_async(messages[i], sources[i], kTag, group);
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      if (!received[i]) continue;
      received[i]->wait();
      run.visit(
          stripes[i].begin + at, messages[i].numel(), [&](const at::Tensor& to, int64_t from) {
            to.copy_(messages[i].narrow(0, from, to.numel()));
          });
    }
  }
}

std::string names_of(const std::vector<Part>& parts) {
  return joined_by(", ", c10::fmap(parts, [](const Part& part) {
                     return ddp::str('"', part.name(), part.is_per_rank() ? "\" (per rank)" : "\"");
                   }));
}

/// A rank's message to the others. The first source's has also the state, without the bulk's
/// elements.
struct Told {
  bool needs_state = false;
  std::string names;
  Progress progress;
  std::vector<std::string> small;  // by part; "" of one that is per rank
  std::vector<std::string> bulk;   // of flatten(), by part
};

std::string text_of(const Told& told) {
  return packed(
      {told.needs_state ? "1" : "", told.names,
       ddp::str(told.progress.steps, " ", told.progress.turns, " ", told.progress.turns_of_step),
       packed(told.small), packed(told.bulk)});
}

Told told_by(const std::string& text) {
  const auto texts = unpacked(text);
  Told told;
  told.needs_state = !texts.at(0).empty();
  told.names = texts.at(1);
  InputText numbers(texts.at(2));
  numbers >> told.progress.steps >> told.progress.turns >> told.progress.turns_of_step;
  told.small = unpacked(texts.at(3));
  told.bulk = unpacked(texts.at(4));
  return told;
}

std::string find_other_names(const std::vector<std::string>& names) {
  const auto rank = first_different_rank(names);
  if (rank == 0) return "";
  return ddp::str(
      "Elastic: expected the same parts on every rank, got ", names[0], " on rank 0 and ",
      names[rank], " on rank ", rank, " of ", names.size(),
      ". Add the same names everywhere, in the same order.");
}

Told own_part_of(
    const GenerationForm& form, bool needs_state, std::vector<Part>& parts,
    const Progress& progress, std::vector<at::Tensor>& bulk) {
  Told told;
  told.needs_state = needs_state;
  told.names = names_of(parts);
  told.progress = progress;
  if (!form.is_source()) return told;
  const bool is_first = form.rank == form.sources.front();
  for (auto& part : parts) {
    if (part.is_per_rank()) continue;
    if (is_first) told.small.push_back(packed_state(part.small_state()));
    if (!part.is_bulk()) continue;
    auto flat = flatten(part.state());
    bulk.insert(bulk.end(), flat.tensors.begin(), flat.tensors.end());
    if (is_first) told.bulk.push_back(std::move(flat.text));
  }
  return told;
}

/// The first source's state, as far as this rank takes it.
std::vector<std::pair<Part*, c10::IValue>> states_to_load(
    const Told& source, bool needs_state, std::vector<Part>& parts,
    std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<Part*, c10::IValue>> states;
  size_t small = 0, bulk = 0;
  for (auto& part : parts) {
    if (part.is_per_rank()) continue;
    const auto& own_small = source.small.at(small++);
    if (part.is_bulk() && needs_state) {
      states.emplace_back(&part, unflatten(source.bulk.at(bulk++), tensors));
    } else if (needs_state || !part.compares_itself()) {
      states.emplace_back(&part, unpacked_state(own_small));
    }
  }
  return states;
}

}  // namespace

void exchange_state(
    const ProcessGroup& group, const GenerationForm& form, bool needs_state,
    std::vector<Part>& parts, Progress& progress) {
  constexpr const char* kDoing = "exchanging the state";
  std::vector<at::Tensor> bulk;
  std::string problem;
  Told own;
  problem = problem_of([&] { own = own_part_of(form, needs_state, parts, progress, bulk); });
  const auto texts = agree(
      packed({problem, text_of(own)}), group, kDoing, [](const std::vector<std::string>& by_rank) {
        std::vector<std::string> names;
        for (const auto& text : by_rank) {
          const auto both = unpacked(text);
          if (!both.at(0).empty()) return both[0];
          names.push_back(told_by(both.at(1)).names);
        }
        return find_other_names(names);
      });
  std::vector<int> receivers;
  Told source;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    auto told = told_by(unpacked(texts[rank]).at(1));
    if (told.needs_state) receivers.push_back(static_cast<int>(rank));
    if (static_cast<int>(rank) == form.sources.front()) source = std::move(told);
  }
  if (form.is_source() && !receivers.empty()) {
    const auto place = std::find(form.sources.begin(), form.sources.end(), form.rank);
    const ByteRun run(bulk);
    send_stripe(
        run,
        stripe_of(
            run.size(), static_cast<size_t>(place - form.sources.begin()), form.sources.size()),
        receivers, group);
  }
  problem = problem_of([&] {
    std::vector<at::Tensor> tensors;
    const auto states = states_to_load(source, needs_state, parts, tensors);
    const ByteRun run(tensors);
    if (needs_state) receive_stripes(run, form.sources, group);
    for (const auto& [part, state] : states) {
      part->is_bulk() && !needs_state ? part->load_small(state) : part->load(state);
    }
    progress = source.progress;
  });
  agree(problem, group, kDoing, [](const std::vector<std::string>& by_rank) {
    for (const auto& text : by_rank) {
      if (!text.empty()) return text;
    }
    return std::string();
  });
}

void verify_equal(const ProcessGroup& group, std::vector<Part>& parts) {
  std::vector<std::string> compared;
  std::vector<std::string> names_and_hashes{names_of(parts)};
  for (auto& part : parts) {
    if (part.is_per_rank() || part.compares_itself()) continue;
    compared.push_back(part.name());
    names_and_hashes.push_back(ddp::str(hash_of(part.state())));
  }
  agree(
      packed(names_and_hashes), group, "comparing the parts of an elastic run",
      [&](const std::vector<std::string>& by_rank) {
        const auto names =
            c10::fmap(by_rank, [](const auto& text) { return unpacked(text).at(0); });
        const auto problem = find_other_names(names);
        const auto rank = first_different_rank(by_rank);
        if (!problem.empty() || rank == 0) return problem;
        const auto first = unpacked(by_rank[0]), other = unpacked(by_rank[rank]);
        const auto differs = std::mismatch(first.begin(), first.end(), other.begin()).first;
        return ddp::str(
            "Elastic: expected every part to be equal on all ranks, but \"",
            compared.at(static_cast<size_t>(differs - first.begin()) - 1),
            "\" differs on ranks 0 and ", rank, " of ", by_rank.size(),
            ". Wrap modules in DistributedDataParallel, change parts only within turns, and add "
            "what each rank has of its own by add_per_rank().");
      });
}

}  // namespace ddp::elastic
