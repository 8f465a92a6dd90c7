// One rank's run of a program.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/fully_sharded.h>
#include <ddp/lr_scheduler.h>

#include "differential/plan.h"
#include "differential/stream.h"

namespace ddp::differential {

class RankRun;

/// How a model is trained: a wrapper and its optimizer. What a wrapper lacks is kept from it by the
/// rules.
class Training {
 public:
  virtual ~Training() = default;

  virtual at::Tensor forward(const at::Tensor& x) = 0;
  /// As the printed program calls it.
  virtual std::string call(const std::string& x) const { return "model->forward(" + x + ")"; }
  /// A NoSyncGuard.
  virtual std::shared_ptr<void> no_sync() = 0;
  virtual void sync_in_backward(const at::Tensor& loss) = 0;
  /// Forward and backward of a batch, where they are one call.
  virtual void run_batch(int /*step*/, int /*batch*/) {}
  virtual torch::nn::Module& wrapper() = 0;
  /// The whole parameters, by their names in the net.
  virtual std::vector<std::pair<std::string, at::Tensor>> whole();
  /// Whether `.grad` are whole averages after backward.
  virtual bool has_whole_gradients() const { return true; }
  virtual std::unique_ptr<torch::optim::Optimizer> make_optimizer();
  virtual void clip(torch::optim::Optimizer& optimizer);
  virtual void join(const std::function<void()>& body);
  virtual void step(torch::optim::Optimizer& optimizer);
  /// What averages parameters, whether or not the optimizer has stepped, and what it does at the
  /// end.
  virtual void after_step() {}
  virtual void finish() {}
  virtual void add_to(Checkpointer& checkpointer) = 0;
  /// How the printed program adds them.
  virtual std::string parts() const {
    return "checkpointer.add(\"model\", model).add(\"optimizer\", optimizer);";
  }

 protected:
  explicit Training(RankRun& run) : run_(run) {}
  /// Clips by the norm over the parameters of a module, some of which are cut.
  void clip_norm_of(torch::nn::Module& module);
  RankRun& run_;
};

/// Makes the wrapper of a program, around the run's net.
std::unique_ptr<Training> wrap(RankRun& run);
std::unique_ptr<Training> wrap_replicas(RankRun& run);
std::unique_ptr<Training> wrap_sharded(RankRun& run);
std::unique_ptr<Training> wrap_by_themselves(RankRun& run);
void register_hook(RankRun& run, DistributedDataParallelBase* model);
void set_precision(RankRun& run, DistributedDataParallelOptions& options);
void set_precision(RankRun& run, FullyShardedOptions& options);
/// What a program casts its inputs to, as code and done.
std::string cast_of_input(const Program& program);
at::Tensor cast_input(const Program& program, const at::Tensor& x);
/// An AutocastGuard, if the program has one.
std::shared_ptr<void> autocast(const Program& program);
void make_schedule(RankRun& run);
std::unique_ptr<Training> wrap_pipeline(RankRun& run);
DistributedDataParallelOptions replicas_options(RankRun& run);
FullyShardedOptions sharded_options(RankRun& run);

/// The axes of a program's mesh, where it has one, and the values of layers that are cut.
void make_mesh(RankRun& run);
void set_cut_values(RankRun& run, bool begins_equal);
/// The whole parameters of a module that is cut over ranks, gathered.
std::vector<std::pair<std::string, at::Tensor>> gathered(RankRun& run, torch::nn::Module& module);
void draw_in_turn(RankRun& run, int step);

/// What all constructs of a rank see.
class RankRun {
 public:
  RankRun(const Program& program, const Rank& self, int first_step, Trace& trace)
      : program(program), world(self), self(self), first_step(first_step), trace(trace) {}

  /// Runs the steps from the first one to the end, or to the reload.
  void run();
  /// The optimizer's groups of parameters, and an optimizer over them.
  std::vector<torch::optim::OptimizerParamGroup> make_groups();
  std::unique_ptr<torch::optim::Optimizer> make_optimizer();
  /// A group of the model's matrices, for Muon; makes the optimizer of the rest.
  std::vector<torch::optim::OptimizerParamGroup> make_matrices();
  /// Input and target of a batch, and as the printed program has them.
  struct Inputs {
    at::Tensor x, target;
    std::string x_text, target_text;
  };
  Inputs inputs(int step, int batch);
  /// Adds to the net's calls what comes after its layers.
  void add_calls();

  const Program& program;
  const Rank& world;  ///< all ranks
  Rank self;          ///< among the replicas
  Rank tp{0, 1, {}, nullptr},
      pp{0, 1, {}, nullptr};  ///< among those that share its layers; among the stages
  const int first_step;
  Trace& trace;
  std::shared_ptr<Net> net;
  std::vector<std::shared_ptr<Layer>> layers;
  std::map<size_t, FullyShardedDataParallel<std::shared_ptr<Layer>>>
      units;         ///< of single layers, by their number
  at::Tensor extra;  ///< a tensor of no module that is averaged, too
  std::unique_ptr<Training> training;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<torch::optim::Optimizer> rest;  ///< steps what Muon does not take
  Record record;
  std::string folder;   ///< of checkpoints
  ProcessGroup region;  ///< where ranks average gradients with some others alone
  std::shared_ptr<LRScheduler> schedule;
  std::vector<std::shared_ptr<LRScheduler>> parts_of_schedule;
  std::unique_ptr<AveragedModel> average;
  std::unique_ptr<BatchStream<ShardedStream<at::Tensor>>> batches;  ///< where they come of a stream
  std::unique_ptr<BatchStream<BatchesOfRows>> whole_batches;        ///< or of one of batches
  template <typename Function>
  void with_batches(Function function) {
    if (batches) function(*batches);
    if (whole_batches) function(*whole_batches);
  }
  std::set<std::string> parameters;      ///< the names of all, also of those on other ranks
  std::set<std::string> parameters_cut;  ///< of layers of which other ranks have a part
  std::unique_ptr<GradScaler> scaler;
  bool hook_throws = false;  ///< the communication hook, in this step
  bool optimizer_throws = false;
  bool is_process = false;    ///< that lists its calls, while other processes do, too
  bool is_pretended = false;  ///< other ranks do not exist, so values mean nothing

  std::string label() const { return training_of(program, first_step); }
  int last_step() const {
    return first_step < reload_step(program) ? reload_step(program) : program.number("steps");
  }
  /// A list of C++ with each rank's number, and the rank's own.
  std::string of_rank(const std::vector<int64_t>& numbers) const;

 private:
  void build();
  void make_scaler();
  void make_average();
  void note_average();
  void run_step(int step);
  void run_passes(int step);
  void forward(int step, int batch);
  void backward(const Pass& pass);
  void between(int step);
  void change();
  void change_folder(const std::string& path);
  void note_values(const std::string& when);
  void say_sums();

  void make_stream();

  std::unique_ptr<ShardedStream<at::Tensor>> stream_;
  std::unique_ptr<BatchesOfRows> row_batches_;
  std::map<int, at::Tensor> losses_;
};

/// A program that throws says so.
constexpr const char* kDeliberate = "deliberate";
/// Whether this rank throws here: on the last rank, in the last step.
bool throws(const RankRun& run, int step, const std::string& place);

/// What throws in its backward.
at::Tensor throws_in_backward(const at::Tensor& loss);

DDP_SOURCE(
    plain_name,
    /// A parameter's name in the net, without what wrappers and units add.
    inline std::string plain_name(std::string name) {
      for (const std::string part :
           {"module.", "layers.", "pair0.", "pair1.", "pair2.", "chunk0.", "chunk1."}) {
        for (size_t at = name.find(part); at != std::string::npos; at = name.find(part))
          name.erase(at, part.size());
      }
      return name;
    });

/// A collective of the program's own.
void run_collective(RankRun& run);

/// Wraps calls of a net's layers into checkpoints.
void recompute(RankRun& run);

}  // namespace ddp::differential
