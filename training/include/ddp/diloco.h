#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/checkpoint_part.h>
#include <ddp/export.h>
#include <ddp/model_averager.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// How DiLoCo sends differences of parameters.
enum class DiLoCoWire {
  /// 4 bytes an element.
  Float32,
  /// 2 bytes an element.
  BFloat16,
  /// 1.02 bytes an element: blocks of 256 elements, each with the scale max|x| / 127 in float32.
  Int8,
};
/// An older name of DiLoCoWire.
using Wire = DiLoCoWire;

/// Options for `DiLoCo`; the same on every rank, but for the groups.
///
/// Example:
/// ```
/// // 8 ranks in 2 regions: ranks 0 to 3 and 4 to 7.
/// const auto local = ddp::split_group(rank / 4);
/// const auto regions = ddp::split_group(rank % 4 == 0 ? 0 : -1);
/// ddp::DiLoCoOptions().regions(regions).local(local);
/// ```
struct DiLoCoOptions {
  /// H: each fragment is exchanged once in so many inner steps. Default: 500
  TORCH_ARG(int64_t, sync_every) = 500;
  /// The outer optimizer's rate. Default: 0.7
  TORCH_ARG(double, outer_lr) = 0.7;
  /// Its momentum, in [0, 1). Default: 0.9
  TORCH_ARG(double, outer_momentum) = 0.9;
  /// Whether that momentum is Nesterov's. Default: true
  TORCH_ARG(bool, nesterov) = true;
  /// P: the parameters in order, cut by elements into so many nearly equal runs that take turns,
  /// H / P steps apart. Default: 1
  TORCH_ARG(int64_t, fragments) = 1;
  /// Inner steps, at most H / P, that go on while a fragment is on its way. Default: 0, ranks wait
  TORCH_ARG(int64_t, overlap) = 0;
  /// a: the part of its own value that a parameter keeps when the outer one arrives, in [0, 1).
  /// Default: 0, it takes the outer one
  TORCH_ARG(double, mix) = 0;
  /// What differences are sent as. Default: BFloat16
  TORCH_ARG(DiLoCoWire, wire) = DiLoCoWire::BFloat16;
  /// Add what a wire of few bits left out to the next difference; 4 bytes of host memory a
  /// parameter. Default: false
  TORCH_ARG(bool, error_feedback) = false;
  /// The leaders: one rank of each region; empty on the other ranks. Default: none, a single region
  TORCH_ARG(ProcessGroup, regions) = {};
  /// In place of `regions`, and as that on one rank of each region: the coordinator of regions that
  /// may leave and join, "HOST:PORT/TOKEN", as `ddprun --coordinate` prints it. Default: none
  TORCH_ARG(std::string, coordinator) = "";
  /// With `coordinator`, backend and timeout of the leaders' groups. Default: "gloo"
  TORCH_ARG(ProcessGroupOptions, group_options) = ProcessGroupOptions().backend("gloo");

 public:
  /// An older name of group_options.
  DiLoCoOptions& group(ProcessGroupOptions options) { return group_options(std::move(options)); }
  /// As group_options().
  const ProcessGroupOptions& group() const { return group_options_; }
  /// As group_options().
  ProcessGroupOptions& group() { return group_options_; }
  /// The ranks of this region. Default: none, a region is one rank
  TORCH_ARG(ProcessGroup, local) = {};
};

/// What DiLoCo has sent so far; zeros on ranks that are no leaders, but for the wait.
struct DiLoCoStats {
  /// Over the slow link by this rank, without the transport's own.
  int64_t bytes_sent = 0;
  /// Of exchanges, in the background too.
  double seconds_sent = 0;
  /// Of average_parameters(), for exchanges.
  double seconds_waited = 0;
  /// Those of the last round, by their rank in the leaders' group; with a coordinator, their slots,
  /// on leaders.
  std::vector<int64_t> regions;
};

/// One line of text: regions, MiB sent, and the seconds that this rank sent and waited.
DDP_API std::string summary(const DiLoCoStats& stats);

/// Trains regions together over a slow link: a region's ranks average gradients in every step, as
/// with DistributedDataParallel over `local`; once in `sync_every` steps the regions exchange how
/// far their parameters p have come, d = o - p, and an outer optimizer steps the outer parameters
/// o, which are equal everywhere, by the mean of d: m = 0.9 m + d, o -= 0.7 (d + 0.9 m). Then
/// p = o.
///
/// One line beside PostLocalSGDOptimizer:
/// ```
/// ddp::PostLocalSGDOptimizer optimizer(
///     adamw, std::make_shared<ddp::DiLoCo>(net->parameters(), options));
/// ```
/// With one fragment, no overlap, outer_lr 1 and no momentum it is a PeriodicModelAverager.
///
/// Each region may train on as many ranks as it likes; all take as many steps. Buffers and the
/// inner optimizer's state stay each region's own.
///
/// **Bytes.** A leader sends and receives b Phi bytes a round with two regions, and
/// 2 (K - 1) / K b Phi with K > 2; Phi is the number of parameters, b is 4, 2 or 1.02. In one piece
/// with one fragment, in P pieces else.
///
/// **Regions that leave and join.** With a `coordinator` a region that is lost, or whose DiLoCo is
/// destroyed, costs the others no step: an exchange under way is repeated without it. Three losses
/// within one round end the job. A region that joins watches the others' next exchange, and takes
/// outer parameters, momentum and the parts of add() from one of them, while they train on; from
/// the exchange after it on its difference counts. Call begin() after the parts are added, in every
/// region. A region that comes to an exchange later than the others by the timeout of `group`, and
/// after it has joined by the time that this took longer, is left out. Without the coordinator
/// regions train on until one is lost, joins or leaves.
///
/// **Errors.** With `regions`, where the link fails, a region does not come within the timeout of
/// `regions`, or a region's parameters are not finite, every rank throws at the step in which the
/// round is due. The round is then not applied, and d grows on: nothing is lost, but the groups are
/// aborted as after any failure. A link that is cut in the last moments of a round may leave a
/// region a round ahead: go on from a checkpoint.
///
/// Memory: 8 bytes of host memory a parameter, 16 where one of them is double, and a fragment on
/// the wire; while a region joins, copies of what it takes. Threads: one thread, as the groups; the
/// leader's exchanges run on a thread and in a group of their own where `overlap` is not 0, so the
/// program may use `regions` for other calls. Source: DiLoCo,
/// arXiv:2311.08105; streaming, arXiv:2501.18512.
class DDP_API DiLoCo final : public ModelAverager {
 public:
  /// Gives all regions the parameters of the first.
  ///
  /// \param parameters  floating, the same on every rank in shapes and order; the tensors that the
  ///        optimizer steps.
  /// \throws c10::ValueError  an option out of its range; no parameters, or others than floating
  ///         ones. c10::Error  on every rank, where the ranks have other options or numbers of
  ///         parameters, or a region has no leader or several.
  ///
  /// Collective: yes, over `local` and `regions`. Blocks: host.
  DiLoCo(std::vector<at::Tensor> parameters, const DiLoCoOptions& options);
  /// Drops an exchange under way: then the leaders' group is aborted. With a coordinator, the other
  /// regions go on; waits for them for at most some seconds.
  ~DiLoCo() override;

  /// Adds what a region that joins takes from another: the inner optimizer, its scheduler, buffers.
  /// The same names in all regions, before begin(). Without a coordinator it has no effect.
  ///
  /// \param name, part  as of Checkpointer::add. It must outlive this object. With a coordinator, a
  ///         state that each rank of a region has whole: it is read in average_parameters().
  /// \throws c10::ValueError  a part that is cut over the region's ranks.
  template <typename T>
  DiLoCo& add(const std::string& name, T& part) {
    return add_part(name, detail::part_of(part));
  }

  /// Where regions may join, call it before the first step. A region that joins others waits here
  /// for their next exchange, and has then the outer parameters and all parts.
  ///
  /// \return  step(): how many inner steps the regions have taken.
  /// \throws  Fenced, QuorumLost; c10::Error  other parts, or the others have ended.
  ///
  /// Collective: over `local`. Blocks: host, in a region that joins.
  int64_t begin();

  /// How many exchanges were applied.
  int64_t round() const;
  /// What this rank has sent, and waited for.
  DiLoCoStats stats() const;

  /// Applies a mean that is on its way. Call it at the end of training. With a coordinator, waits
  /// for the end of the other regions' training.
  ///
  /// \throws  Fenced; QuorumLost where a region is lost meanwhile and the coordinator cannot be
  ///         reached for as long as its --wait says.
  ///
  /// Collective: yes. Blocks: host.
  void finish();

  /// Refuses: the regions are those of the options. Load what save() wrote into another DiLoCo.
  void rebind(const GroupArg& group = {}) override;

  /// Saves outer parameters, momentum, residuals, round, step, and a mean on its way. All but the
  /// residuals of error_feedback is the same on every rank; with these, each region saves its own.
  ///
  /// Collective: no. Blocks: on a leader, until a mean on its way is here.
  /// \throws c10::Error  the exchange failed.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Loads what save() wrote; parameters are loaded with the model. The regions may be others.
  ///
  /// \throws c10::ValueError  another number of parameters or fragments; on a leader an archive of
  ///         a rank that is none, with a mean on its way.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  class Impl;

  void apply(const std::vector<at::Tensor>& parameters, int64_t step) override;
  DiLoCo& add_part(const std::string& name, detail::CheckpointPartPtr part);

  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
