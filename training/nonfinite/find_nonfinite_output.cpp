#include <ddp/find_nonfinite_output.h>

#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/record_function.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

bool may_be_infinite(const at::Tensor& t) {
  return t.defined() && t.has_storage() && (t.is_floating_point() || t.is_complex());
}

bool has_finite_values(const at::Tensor& t) { return at::isfinite(t).all().item<bool>(); }

template <typename Values>
std::vector<at::Tensor> tensors_of(const Values& values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    if (value.isTensor() && may_be_infinite(value.toTensor())) tensors.push_back(value.toTensor());
    if (!value.isTensorList()) continue;
    for (const at::Tensor& t : value.toTensorVector()) {
      if (may_be_infinite(t)) tensors.push_back(t);
    }
  }
  return tensors;
}

/// Follows values that are not finite through the operators of one thread to those that made them.
class NonfiniteOrigins {
 public:
  explicit NonfiniteOrigins(const torch::nn::Module& module) {
    for (const auto& p : module.named_parameters()) add_name(p.key(), p.value());
    for (const auto& b : module.named_buffers()) add_name(b.key(), b.value());
  }

  /// The operator begins; operators may be nested.
  void begin(const at::RecordFunction& op) {
    if (running_.empty()) ++count_;
    Running running{op.name(), {}, ""};
    for (const auto& input : tensors_of(op.inputs())) {
      if (const auto name = names_.find(memory_of(input)); name != names_.end()) {
        running.names += ddp::str(running.names.empty() ? "" : ", ", '"', name->second, '"');
      }
      if (running.origin.empty() && !has_finite_values(input)) running.origin = origin_of(input);
    }
    running_.push_back(std::move(running));
  }

  void end(const at::RecordFunction& op) {
    if (running_.empty()) return;
    const auto running = running_.back();
    for (const auto& output : tensors_of(op.outputs())) {
      if (has_finite_values(output)) {
        origins_.erase(memory_of(output));
      } else if (origins_.find(memory_of(output)) == origins_.end()) {
        origins_[memory_of(output)] = {
            output, running.origin.empty() ? text_of(output) : running.origin};
      }
    }
    running_.pop_back();
  }

  /// \return  why `value`, which is not finite, is not.
  std::string origin_of(const at::Tensor& value) const {
    const auto found = origins_.find(memory_of(value));
    if (found != origins_.end()) return found->second.text;
    const auto name = names_.find(memory_of(value));
    if (name != names_.end()) {
      return ddp::str('"', name->second, "\" ", value.sizes(), " is not finite itself");
    }
    return ddp::str(
        "a tensor ", value.sizes(), " that no operator of the pass made is not finite itself");
  }

 private:
  struct Running {
    std::string name;
    std::string origin;  // of an input that is not finite; "" where all are
    std::string names;   // of the parameters and buffers that it reads
  };
  struct Origin {
    at::Tensor value;  // keeps the memory, so that no other tensor gets it
    std::string text;
  };

  static const void* memory_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

  void add_name(const std::string& name, const at::Tensor& t) {
    if (may_be_infinite(t)) names_[memory_of(t)] = name;
  }

  // The program called the outermost operator.
  std::string text_of(const at::Tensor& output) const {
    const auto& outer = running_.front();
    const auto& inner = running_.back();
    return ddp::str(
        outer.name, running_.size() > 1 ? " (" + inner.name + ")" : "",
        outer.names.empty() ? "" : " of " + outer.names, ": the first result that is not finite, ",
        output.sizes(), ", operator ", count_, " of the pass");
  }

  std::unordered_map<const void*, std::string> names_;  // by memory
  std::unordered_map<const void*, Origin> origins_;     // by memory
  std::vector<Running> running_;                        // outermost first
  int64_t count_ = 0;                                   // of operators that the program called
};

thread_local NonfiniteOrigins* t_origins = nullptr;

/// Observes this thread's operators while it exists.
class Observation {
 public:
  explicit Observation(NonfiniteOrigins& origins) : before_(std::exchange(t_origins, &origins)) {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
              act(op, &NonfiniteOrigins::begin);
              return nullptr;
            },
            [](const at::RecordFunction& op, at::ObserverContext*) {
              act(op, &NonfiniteOrigins::end);
            })
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~Observation() {
    at::removeCallback(handle_);
    t_origins = before_;
  }
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  static void act(
      const at::RecordFunction& op, void (NonfiniteOrigins::*event)(const at::RecordFunction&)) {
    if (t_origins == nullptr || !op.operator_name()) return;
    const at::DisableRecordFunctionGuard own_operators_are_not_seen;
    const at::NoGradGuard no_grad;
    (t_origins->*event)(op);
  }

  NonfiniteOrigins* before_;
  at::CallbackHandle handle_;
};

}  // namespace

std::string detail::find_nonfinite_output(
    const torch::nn::Module& module, const std::function<std::vector<at::Tensor>()>& forward) {
  NonfiniteOrigins origins(module);
  std::vector<at::Tensor> results;
  {
    const Observation observation(origins);
    results = forward();
  }
  const at::NoGradGuard no_grad;
  for (const auto& result : results) {
    if (may_be_infinite(result) && !has_finite_values(result)) return origins.origin_of(result);
  }
  return "";
}

}  // namespace ddp
