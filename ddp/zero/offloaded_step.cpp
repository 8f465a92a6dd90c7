// Steps of a sharded optimizer whose state is on the host or in a file.
#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "zero/sharded_optimizer.h"

namespace ddp {
namespace {

// A window's parameters: large enough for links and disks, small enough that a few windows are
// little memory.
constexpr size_t kWindowBytes = size_t{4} << 20;

/// The gradients of the optimizer's parameters, for one step of theirs.
class WindowGradients {
 public:
  explicit WindowGradients(const std::vector<PieceOfChunk>& window) : window_(window) {}
  ~WindowGradients() {
    for (const auto& piece : window_) piece.value().mutable_grad().reset();
  }
  C10_DISABLE_COPY_AND_ASSIGN(WindowGradients);

  /// \param of_staged  the gradients on the host, of the pieces that are staged.
  template <typename IsStaged>
  void set(const std::vector<at::Tensor>& of_staged, const IsStaged& is_staged) {
    size_t next = 0;
    for (const auto& piece : window_) {
      piece.value().mutable_grad() = is_staged(*piece.chunk) ? of_staged[next++] : piece.gradient;
    }
  }

 private:
  const std::vector<PieceOfChunk>& window_;
};

const void* key_of(const PieceOfChunk& piece) { return piece.value().unsafeGetTensorImpl(); }

}  // namespace

ShardedOptimizer::Pieces ShardedOptimizer::all_pieces() {
  Pieces pieces;
  for (auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk.pieces.size(); ++i) pieces.push_back({&chunk, i});
  }
  return pieces;
}

std::vector<ShardedOptimizer::Pieces> ShardedOptimizer::windows_of(Pieces pieces) {
  std::vector<Pieces> windows;
  size_t bytes = kWindowBytes;
  for (auto& piece : pieces) {
    const auto own = static_cast<size_t>(piece.piece().numel) * piece.value().element_size();
    if (bytes + own > kWindowBytes) {
      windows.emplace_back();
      bytes = 0;
    }
    bytes += own;
    windows.back().push_back(std::move(piece));
  }
  return windows;
}

bool ShardedOptimizer::is_staged(const ShardChunk& chunk) const {
  return staging_ && !chunk.flat.whole().is_cpu();
}

std::vector<StagedPiece> ShardedOptimizer::staged(const Pieces& window) const {
  std::vector<StagedPiece> pieces;
  for (const auto& piece : window) {
    if (!is_staged(*piece.chunk)) continue;
    pieces.push_back({piece.value(), piece.parameter(), piece.gradient});
  }
  return pieces;
}

// Adagrad makes its state when it is made. An optimizer of each window makes the window's, which
// then moves into the file, so that the whole state is never in other memory.
void ShardedOptimizer::make_offloaded(
    const Groups& own, const torch::optim::OptimizerOptions& defaults) {
  Groups empty;
  for (const auto& group : own) {
    empty.emplace_back(std::vector<at::Tensor>{}, group.options().clone());
  }
  optimizer_ = make(empty, defaults);
  std::unordered_map<const void*, size_t> group_of;
  for (size_t g = 0; g < own.size(); ++g) {
    for (const auto& value : own[g].params()) group_of[value.unsafeGetTensorImpl()] = g;
  }
  for (const auto& window : windows_of(all_pieces())) {
    staging_->place(0, staged(window));
    auto groups = empty;
    for (const auto& piece : window) {
      groups[group_of.at(key_of(piece))].params().push_back(piece.value());
    }
    auto states = std::move(make(groups, defaults)->state());
    for (auto& [key, state] : states) optimizer_->state()[key] = std::move(state);
    keep_states(window);
  }
  for (size_t g = 0; g < own.size(); ++g) optimizer_->param_groups()[g].params() = own[g].params();
}

void ShardedOptimizer::keep_states(const Pieces& window) {
  for (const auto& piece : window) {
    if (auto* state = state_of(piece.value())) keep_state(piece, *state);
  }
  if (file_ && !window.empty()) file_->write(key_of(window.front()), key_of(window.back()));
}

void ShardedOptimizer::step_by_windows(const std::vector<Pieces>& windows) {
  const auto fetch = [&](size_t w) {
    if (w >= windows.size()) return;
    if (file_) file_->prefetch(key_of(windows[w].front()), key_of(windows[w].back()));
    staging_->fetch(w, staged(windows[w]));
  };
  fetch(0);
  for (size_t w = 0; w < windows.size(); ++w) {
    fetch(w + 1);
    {
      WindowGradients gradients(windows[w]);
      gradients.set(staging_->await(w), [&](const auto& chunk) { return is_staged(chunk); });
      optimizer_->step();
    }
    staging_->put(w);
    keep_states(windows[w]);
  }
}

}  // namespace ddp
