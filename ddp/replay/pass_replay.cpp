#include "replay/pass_replay.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "replicas/replica_check.h"

namespace ddp {

/// Gradients of one backward pass, which hooks write.
struct PassGradients {
  std::mutex mutex;                          // autograd has a thread for each device
  std::vector<uint64_t> of_parameters = {};  // hashes; 0 without one
  std::vector<at::Tensor> of_outputs = {};
  bool has_repeated = false;  // a parameter got several: a backward pass inside the backward pass
};

namespace {

using torch::autograd::variable_list;

constexpr const char* kDoing = "repeating another rank's micro-batch";
constexpr const char* kCommunicates =
    "replay_every: expected a module that communicates nothing, got one whose forward called "
    "collectives. Leave replay_every out.";
constexpr const char* kRepeated =
    "replay_every: expected one gradient of each parameter in a backward pass, got several, as of "
    "a checkpoint that runs a backward pass of its own. Leave replay_every out.";

// An undefined one has no elements and no gradient.
uint64_t hash_of_defined(const at::Tensor& tensor) {
  return tensor.defined() ? hash_of(std::vector<at::Tensor>{tensor}) : 0;
}

uint64_t hash_of_list(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = tensors.size();
  for (const auto& tensor : tensors) hash = mixed(hash, hash_of_defined(tensor));
  return hash;
}

// 0 where no parameter has one.
uint64_t hash_of_gradients(const std::vector<uint64_t>& hashes) {
  uint64_t all = hashes.size();
  for (const auto hash : hashes) all = mixed(all, hash);
  return any_of(hashes, [](uint64_t hash) { return hash != 0; }) ? all : 0;
}

class GradientHash : public torch::autograd::FunctionPreHook {
 public:
  GradientHash(std::shared_ptr<PassGradients> gradients, size_t parameter)
      : gradients_(std::move(gradients)), parameter_(parameter) {}

  variable_list operator()(const variable_list& given) override {
    const auto hash = given.empty() ? 0 : hash_of_defined(given.front());
    const std::lock_guard lock(gradients_->mutex);
    auto& kept = gradients_->of_parameters[parameter_];
    gradients_->has_repeated = gradients_->has_repeated || kept != 0;
    kept = hash;
    return given;
  }

  const PassGradients* owner() const { return gradients_.get(); }

 private:
  const std::shared_ptr<PassGradients> gradients_;
  const size_t parameter_;
};

using ModuleList = std::vector<std::shared_ptr<torch::nn::Module>>;

// A letter a module: 1 in train(), 0 in eval().
std::string modes_of(const ModuleList& modules) {
  std::string modes;
  for (const auto& module : modules) modes += module->is_training() ? '1' : '0';
  return modes;
}

/// While it exists, modules are in the modes of another rank's.
class ModeScope {
 public:
  ModeScope(const ModuleList& modules, const std::string& modes)
      : modules_(modules), own_(modes_of(modules)) {
    set(modes);
  }
  ~ModeScope() {
    problem_of([&] { set(own_); });
  }
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  // train() sets a module's children, too, which come after it in the list.
  void set(const std::string& modes) const {
    if (modes == modes_of(modules_)) return;
    for (size_t i = 0; i < std::min(modes.size(), modules_.size()); ++i) {
      modules_[i]->train(modes[i] == '1');
    }
  }

  const ModuleList& modules_;
  const std::string own_;
};

}  // namespace

/// A micro-batch of this rank, and how to repeat another rank's.
struct PassReplay::Noted {
  detail::CallArguments arguments;
  detail::RepeatCall repeat;
  std::vector<at::Tensor> parameters, buffers;
  ModuleList modules;
  std::string modes;
  AutocastState autocast;
  TensorMessage message;  // arguments, surroundings, and then gradients of outputs
  uint64_t outputs = 0;
  uint64_t calls_before = 0;  // collectives that this thread had started
  bool communicates = false;
  bool has_outputs = false;
  std::shared_ptr<PassGradients> gradients = std::make_shared<PassGradients>();

  void add_hooks() {
    gradients->of_parameters.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      // add_hook() takes no tensor that has hooks.
      torch::autograd::impl::hooks(parameters[i])
          .push_back(std::make_unique<GradientHash>(gradients, i));
    }
  }
  bool is_mine(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) const {
    const auto* mine = dynamic_cast<const GradientHash*>(hook.get());
    return mine != nullptr && mine->owner() == gradients.get();
  }
  /// Whether the program has hooks on parameters, which a repeated pass would call. The first that
  /// it registers on a parameter takes the place of the hash's.
  bool has_other_hooks() const {
    return any_of(parameters, [this](const at::Tensor& parameter) {
      const auto& hooks = torch::autograd::impl::hooks(parameter);
      return hooks.size() != 1 || !is_mine(hooks.front());
    });
  }
  void remove_hooks() {
    for (const auto& parameter : parameters) {
      drop_if(torch::autograd::impl::hooks(parameter), [this](const auto& hook) {
        return is_mine(hook);
      });
    }
  }
  ~Noted() { remove_hooks(); }
};

/// The message of another rank.
struct PassReplay::Received {
  std::string bytes_of_arguments, layout, modes;
  at::Tensor bytes;
  size_t arguments = 0;  // tensors
  size_t outputs = 0;    // the same
};

/// A pass, as all ranks know it.
struct PassReplay::Exchange {
  std::vector<std::string> messages, hosts;
  std::vector<int> job_ranks;
  bool has_other_hooks = false;  // on this rank
  bool with_gradients = true;
};

PassReplay::Received PassReplay::received_of(const std::string& message) {
  const auto fields = unpacked(message);
  Received received;
  received.bytes_of_arguments = fields.at(0);
  received.layout = fields.at(1);
  received.arguments = std::stoull(fields.at(2));
  received.outputs = std::stoull(fields.at(3));
  received.modes = fields.at(4);
  return received;
}

PassReplay::PassReplay(int64_t every) : every_(every) {}

PassReplay::~PassReplay() = default;

void PassReplay::restart() {
  passes_ = 0;
  noted_.reset();
  end_pass();
}

// A pass with another error has left its verdict.
void PassReplay::end_pass() {
  forwards_ = 0;
  verdict_ = {};
}

void PassReplay::note_call(
    detail::CallArguments arguments, detail::RepeatCall repeat, const torch::nn::Module& module,
    const std::vector<at::Tensor>& parameters) {
  noted_.reset();
  if (parameters.empty()) return;  // tensors of also_average() alone
  auto noted = std::make_unique<Noted>();
  noted->repeat = std::move(repeat);
  noted->parameters = parameters;
  noted->buffers = module.buffers();
  noted->modules = module.modules();
  noted->modes = modes_of(noted->modules);
  noted->autocast = AutocastState::current();
  for (const auto& tensor : arguments.tensors) noted->message.add(tensor);
  for (const auto& tensor : surroundings_of(noted->buffers, parameters.front().device())) {
    noted->message.add(tensor);
  }
  noted->arguments = std::move(arguments);
  noted->add_hooks();
  noted_ = std::move(noted);
}

void PassReplay::enter_forward() {
  if (noted_) noted_->calls_before = calls_of_this_thread();
}

void PassReplay::note_outputs(const std::vector<at::Tensor>& outputs) {
  if (!noted_ || noted_->has_outputs) return;
  noted_->has_outputs = true;
  noted_->communicates = calls_of_this_thread() != noted_->calls_before;
  noted_->outputs = hash_of_list(outputs);
  noted_->gradients->of_outputs.resize(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || !outputs[i].grad_fn()) continue;
    outputs[i].register_hook([gradients = noted_->gradients, i](const at::Tensor& gradient) {
      const std::lock_guard lock(gradients->mutex);
      gradients->of_outputs[i] = gradient;
    });
  }
}

std::string PassReplay::message_text() {
  for (const auto& gradient : noted_->gradients->of_outputs) noted_->message.add(gradient);
  return packed(
      {noted_->arguments.bytes, noted_->message.layout(),
       std::to_string(noted_->arguments.tensors.size()),
       std::to_string(noted_->gradients->of_outputs.size()), noted_->modes});
}

ReplayHashes PassReplay::repeat(const Received& received, bool with_gradients) const {
  const auto device = noted_->parameters.front().device();
  const auto tensors = TensorMessage::read(received.layout, received.bytes, device);
  const auto begin = tensors.begin();
  const auto arguments_end = begin + static_cast<std::ptrdiff_t>(received.arguments);
  const auto outputs_begin = tensors.end() - static_cast<std::ptrdiff_t>(received.outputs);
  detail::CallArguments arguments{{begin, arguments_end}, received.bytes_of_arguments};
  const ModeScope modes(noted_->modules, received.modes);
  const RepeatScope scope(
      {arguments_end, outputs_begin}, noted_->autocast, noted_->buffers, device);
  const at::AutoGradMode records(true);
  const auto outputs = noted_->repeat(arguments);
  ReplayHashes hashes{hash_of_list(outputs), 0};
  if (!with_gradients || outputs.size() != received.outputs) return hashes;
  variable_list roots, gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& gradient = *(outputs_begin + static_cast<std::ptrdiff_t>(i));
    if (!gradient.defined() || !outputs[i].grad_fn()) continue;
    // The other rank's has what came through outputs that depend on this one, which these roots
    // would add once more.
    outputs[i].register_hook([gradient](const at::Tensor&) { return gradient; });
    roots.push_back(outputs[i]);
    gradients.push_back(gradient);
  }
  if (roots.empty()) return hashes;
  auto leaves = noted_->parameters;
  // As in the pass itself: what an operator computes may depend on what is wanted.
  for (auto at = begin; at != arguments_end; ++at) {
    if (at->defined() && at->requires_grad()) leaves.push_back(*at);
  }
  auto found = torch::autograd::grad(
      roots, leaves, gradients, /*retain_graph=*/false, /*create_graph=*/false,
      /*allow_unused=*/true);
  found.resize(noted_->parameters.size());
  hashes.gradients = hash_of_gradients(c10::fmap(found, hash_of_defined));
  return hashes;
}

ReplayHashes PassReplay::own_hashes(bool with_gradients) const {
  ReplayHashes own{noted_->outputs, 0};
  if (with_gradients) own.gradients = hash_of_gradients(noted_->gradients->of_parameters);
  return own;
}

/// Every rank's message, without its tensors' elements, or why it has none.
///
/// \return whether all ranks have one; verdict_ has their problem.
bool PassReplay::exchange_texts(
    const ProcessGroup& group, GroupMonitor& monitor, Exchange& exchange) {
  std::string problem, text;
  const bool has_call = noted_ && noted_->has_outputs;
  if (has_call) problem = problem_of([&] { text = message_text(); });
  if (has_call && noted_->gradients->has_repeated) problem = kRepeated;
  if (has_call && noted_->communicates) problem = kCommunicates;
  // Without a gradient of an output, the backward pass was that of an earlier forward pass.
  const bool has_gradients =
      has_call && forwards_ == 1 && !exchange.has_other_hooks &&
      any_of(noted_->gradients->of_outputs, [](const auto& t) { return t.defined(); });
  const auto texts = gather_strings(
      packed({has_call ? "1" : "", has_gradients ? "1" : "", problem, text, host_name()}), group,
      kDoing, &monitor);
  for (const auto& of_rank : texts) {
    const auto fields = unpacked(of_rank);
    if (fields.at(0).empty()) return false;  // a backward pass without a forward pass before it
    exchange.with_gradients = exchange.with_gradients && !fields.at(1).empty();
    if (verdict_.text.empty()) verdict_.text = fields.at(2);
    exchange.messages.push_back(fields.at(3));
    exchange.job_ranks.push_back(monitor.job_rank(static_cast<int>(exchange.hosts.size())));
    exchange.hosts.push_back(fields.at(4));
  }
  return verdict_.text.empty();
}

/// Repeats the batch of the rank so far before this one, and gathers the ranks' own hashes and
/// those of what they repeated.
std::vector<std::pair<ReplayHashes, ReplayHashes>> PassReplay::repeated(
    int distance, const Exchange& exchange, const ProcessGroup& group, GroupMonitor& monitor) {
  const int ranks = group->getSize(), rank = group->getRank();
  const int to = (rank + distance) % ranks, from = (rank - distance + ranks) % ranks;
  const auto where = [] { return std::string(kDoing); };
  auto received = received_of(exchange.messages[static_cast<size_t>(from)]);
  ReplayHashes hashes;
  monitor.abort_on_error(where, [&] {
    const auto sent = noted_->message.bytes().to(carrier_device(*group));
    const auto incoming = at::empty({TensorMessage::size_of(received.layout)}, sent.options());
    const EqualMessages equal(incoming, sent);
    const auto works =
        start_messages({P2POp::send(sent, to), P2POp::recv(incoming, from)}, group, where);
    for (const auto& work : works) monitor.wait(*work, where);
    received.bytes = incoming.cpu();
    hashes = repeat(received, exchange.with_gradients);
  });
  const auto own = own_hashes(exchange.with_gradients);
  const auto text =
      ddp::str(own.outputs, " ", own.gradients, " ", hashes.outputs, " ", hashes.gradients);
  return c10::fmap(gather_strings(text, group, kDoing, &monitor), [](const std::string& numbers) {
    std::pair<ReplayHashes, ReplayHashes> both;
    InputText words(numbers);
    words >> both.first.outputs >> both.first.gradients >> both.second.outputs >>
        both.second.gradients;
    return both;
  });
}

void PassReplay::run(const ProcessGroup& group, GroupMonitor& monitor) {
  verdict_ = {};
  const bool is_now = is_due();
  ++passes_;
  if (!is_now) return;
  const struct Forget {
    std::unique_ptr<Noted>& noted;
    ~Forget() { noted.reset(); }
  } forget{noted_};
  Exchange exchange;
  if (noted_) {
    exchange.has_other_hooks = noted_->has_other_hooks();
    noted_->remove_hooks();
  }
  if (!exchange_texts(group, monitor, exchange)) return;
  const auto ranks = static_cast<size_t>(group->getSize());
  std::vector<ReplayedBatch> batches(ranks);
  const auto by_next = repeated(1, exchange, group, monitor);
  for (size_t rank = 0; rank < ranks; ++rank) {
    batches[rank] = {by_next[rank].first, by_next[(rank + 1) % ranks].second, {}};
  }
  if (ranks > 2 && any_of(batches, [](const auto& batch) { return batch.is_disputed(); })) {
    const auto by_third = repeated(2, exchange, group, monitor);
    for (size_t rank = 0; rank < ranks; ++rank) {
      batches[rank].by_third = by_third[(rank + 2) % ranks].second;
    }
  }
  verdict_ = judge(batches, exchange.hosts, exchange.job_ranks);
}

}  // namespace ddp
