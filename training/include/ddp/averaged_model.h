#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

namespace ddp {

/// Options for `AveragedModel`; every rank must pass the same.
struct AveragedModelOptions {
  /// An exponential moving average with this decay, in [0, 1]:
  /// average = decay * average + (1 - decay) * value. Unset: swa(). Default: unset
  TORCH_ARG(std::optional<double>, ema) = {};
  /// With ema: the decay of the update after n others is at most (1 + n) / (10 + n), so that early
  /// values are soon forgotten, as tf.train.ExponentialMovingAverage with num_updates. Python has
  /// no such option. Default: false
  TORCH_ARG(bool, warmup) = false;
  /// Average buffers, too; else they are copied from the model in each update. Default: false
  TORCH_ARG(bool, use_buffers) = false;
  /// Where the averages are. An update then copies the model there. Default: the model's devices
  TORCH_ARG(std::optional<c10::Device>, device) = {};

 public:
  /// The mean of all updates with equal weights: stochastic weight averaging.
  AveragedModelOptions& swa() {
    ema_.reset();
    return *this;
  }
};

class AveragedModel;

/// While it exists, the model of an AveragedModel has the averages.
class DDP_API [[nodiscard]] AppliedAverage {
 public:
  /// restore(); a failure is a warning.
  ~AppliedAverage();
  C10_DISABLE_COPY_AND_ASSIGN(AppliedAverage);

  /// Gives the model back what it had, to the bit, and frees that copy. A second call does nothing.
  void restore();

 private:
  friend class AveragedModel;
  explicit AppliedAverage(AveragedModel& average);

  AveragedModel* average_;
  std::vector<at::Tensor> kept_;  // what the model had
};

/// An average of a model's weights over the steps of its training: stochastic weight averaging
/// (Izmailov et al., arXiv:1803.05407), or an exponential moving average. As Python's
/// torch.optim.swa_utils.AveragedModel, whose numbers, state and files it has.
///
/// ```
/// ddp::AveragedModel ema(*model->module(), ddp::AveragedModelOptions().ema(0.999));
/// for (auto& batch : *loader) {
///   train(batch);  // with optimizer.step()
///   ema.update();
/// }
/// {
///   auto guard = ema.apply();
///   evaluate(model);
/// }
/// ```
/// The first update copies the model, until which the averages are the model of the construction.
/// Parameters keep their dtype: in a 16-bit one, steps of an average that are smaller than half of
/// the last digit are lost. Integers are averaged in float and cut off, as in Python; bools are
/// copied. A tensor that modules share is averaged once.
///
/// It is a module: "n_averaged", and the averages under "module.NAME", by the names of the model
/// without wrappers. So `save_state_dict(ema, file)` writes what Python's `AveragedModel` loads,
/// and load_state_dict() reads what Python saved; Checkpointer::add and Elastic::add take it. In an
/// elastic run, call update() in step().
///
/// **Ranks.** Replicas have equal averages, without communication. Of a model that is cut over the
/// ranks, such as a FullyShardedDataParallel, pass the wrapper (`*model`): each rank averages its
/// own elements, and a Checkpointer saves the whole.
///
/// Thread safety: none. Memory: a copy of parameters and buffers. Ownership: holds the module where
/// a shared_ptr does, else that must outlive it.
class DDP_API AveragedModel : public torch::nn::Module, public ShardedModule {
 public:
  /// \param module  whose parameters and buffers stay the same tensors from here on.
  /// \throws c10::ValueError  a decay out of its range, or warmup without ema.
  ///
  /// Collective: no.
  explicit AveragedModel(torch::nn::Module& module, const AveragedModelOptions& options = {});
  ~AveragedModel() override;
  C10_DISABLE_COPY_AND_ASSIGN(AveragedModel);

  /// Takes the model's present values into the averages: after a step of the optimizer, or an
  /// epoch.
  ///
  /// \throws c10::ValueError  a tensor of the model has other sizes now. c10::Error  inside of
  ///         apply().
  ///
  /// Collective: no. Cost: reads the model, and reads and writes the averages; on a device one
  ///   foreach operator for each dtype.
  void update();
  /// The same, by Python's name.
  void update_parameters() { update(); }

  /// Copies the averages, parameters and buffers, into the model until the guard is destroyed, also
  /// by an exception. What is written to the model meanwhile, as by an optimizer, is lost; a
  /// checkpoint that is saved meanwhile has the averages in the model's place. Not between a
  /// forward pass and its backward.
  ///
  /// \throws c10::Error  inside of another apply(). c10::ValueError  as update().
  ///
  /// Collective: no. Memory: the model's values, while it lasts.
  AppliedAverage apply();

  /// Computes the running statistics of the averages' batch normalizations, BatchNorm1d to 3d and
  /// SyncBatchNorm: resets them, and calls `forward(batch)` for each batch, in training mode and
  /// without autograd, with the averages in the model. The statistics are the mean of those of all
  /// batches. Momenta, modes and the model's values are restored, also after an exception, which
  /// leaves the averages as they were.
  ///
  /// Each rank has the statistics of its own batches, as in Python, where rank 0's are saved. For
  /// those of all ranks' batches, as if one process had seen them, pass the group.
  ///
  /// \param loader  of batches, or a pointer to one.
  /// \param forward  calls the model, such as `net->forward(batch.data)`.
  /// \param group  the ranks that then combine their statistics, which all have to call it.
  /// \throws c10::ValueError  a model without batch normalization; a loader without batches, with a
  ///         group on all of its ranks.
  ///
  /// Collective: with a group. Cost: that of the passes, and one all-reduce.
  template <typename Loader, typename Forward>
  void update_bn(
      Loader&& loader, const Forward& forward, const std::optional<ProcessGroup>& group = {}) {
    const auto pass = [&](auto& batches) {
      update_bn_by(
          [&] {
            for (auto&& batch : batches) forward(batch);
          },
          group);
    };
    if constexpr (IsRange<std::remove_reference_t<Loader>>::value) {
      pass(loader);
    } else {
      pass(*loader);
    }
  }

  /// How many updates the averages have.
  int64_t n_averaged() const;

  /// The averages by Python's names: "n_averaged", "module.NAME". They share memory with these.
  torch::OrderedDict<std::string, at::Tensor> state_dict() const;

  /// ShardedModule. As the model's.
  std::vector<ParameterLayout> layouts() override;

 private:
  friend class AppliedAverage;
  struct Item {
    std::string name;  // the first one in the model
    at::Tensor value;  // the model's
    at::Tensor average;
    bool is_buffer;
  };
  template <typename T, typename = void>
  struct IsRange : std::false_type {};
  template <typename T>
  struct IsRange<T, std::void_t<decltype(std::begin(std::declval<T&>()))>> : std::true_type {};

  void update_bn_by(const std::function<void()>& pass, const std::optional<ProcessGroup>& group);
  void check_not_applied(const char* call) const;
  void check_sizes(const char* call) const;

  torch::nn::Module& source_;
  std::shared_ptr<torch::nn::Module> owner_;  // of source_, where it has one
  AveragedModelOptions options_;
  std::vector<Item> items_;
  std::vector<std::pair<std::string, at::Tensor>> named_;  // of all names, in the model's order
  at::Tensor n_averaged_;
  bool is_applied_ = false;
};

}  // namespace ddp
