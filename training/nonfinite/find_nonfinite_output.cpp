#include <ddp/find_nonfinite_output.h>

#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

bool may_be_infinite(const at::Tensor& t) {
  return t.defined() && t.has_storage() && !t.is_meta() &&
         (t.is_floating_point() || t.is_complex());
}

bool has_finite_values(const at::Tensor& t) {
  // LibTorch's isfinite() does not take all dtypes of one byte.
  const auto values = c10::isFloat8Type(t.scalar_type()) ? t.to(at::kFloat) : t;
  return at::isfinite(values).all().item<bool>();
}

void add_tensors(std::vector<at::Tensor>& tensors, const c10::IValue& value) {
  if (value.isTensor() && may_be_infinite(value.toTensor())) tensors.push_back(value.toTensor());
  if (!value.isTensorList()) return;
  for (const at::Tensor& t : value.toTensorVector()) {
    if (may_be_infinite(t)) tensors.push_back(t);
  }
}

// Whether the operator's results are memory that nobody has written to. With
// set_deterministic(seed) LibTorch fills it with NaN.
bool gives_unwritten_memory(const std::string& op) {
  return op.find("::empty") != std::string::npos || op.find("::new_empty") != std::string::npos ||
         op.find("::resize") != std::string::npos;
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
    auto& running = running_.emplace_back();
    running.name = op.name();
    const auto schema = op.operator_schema();
    const auto inputs = op.inputs();
    std::vector<at::Tensor> outputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_known = schema && i < schema->arguments().size();
      const auto* argument = is_known ? &schema->arguments()[i] : nullptr;
      const auto* alias = argument ? argument->alias_info() : nullptr;
      const bool is_out = argument && argument->is_out();
      const bool is_written = alias && alias->isWrite();
      add_tensors(is_out ? outputs : is_written ? running.written : running.read, inputs[i]);
    }
    for (const auto& input : running.read) look_at_input(running, input);
    // After them, as the operator may replace values that nobody has written.
    for (const auto& input : running.written) look_at_input(running, input);
    for (auto& output : outputs) {
      forget_values(output);
      running.written.push_back(std::move(output));
    }
  }

  void end(const at::RecordFunction& op) {
    if (running_.empty()) return;
    const auto& running = running_.back();
    std::vector<at::Tensor> results;
    for (const c10::IValue& output : op.outputs()) add_tensors(results, output);
    // A view of what the operator read is no result.
    drop_if(results, [&](const at::Tensor& result) {
      return any_of(running.read, [&](const at::Tensor& t) { return t.is_alias_of(result); });
    });
    for (const auto& tensors : {results, running.written}) {
      for (const auto& value : tensors) note_result(value);
    }
    running_.pop_back();
  }

  /// \return  why `value`, which is not finite, is not.
  std::string origin_of(const at::Tensor& value) const {
    const auto found = origins_.find(memory_of(value));
    if (found != origins_.end()) return found->second.text;
    const auto name = names_.find(memory_of(value));
    if (name != names_.end()) {
      const auto& [text, whole] = name->second;  // the value may be a view
      return ddp::str('"', text, "\" ", whole.sizes(), " is not finite itself");
    }
    return ddp::str(
        "a tensor ", value.sizes(), " that no operator of the pass made is not finite itself");
  }

 private:
  struct Running {
    std::string name;
    std::string origin = {};  // of an input that is not finite; "" where all are
    std::string names = {};   // of the parameters and buffers that it reads
    std::vector<at::Tensor> read = {}, written = {};  // its inputs: those that it leaves alone
  };
  struct Origin {
    at::Tensor value;  // keeps the memory, so that no other tensor gets it
    std::string text;
    bool is_unwritten;  // by an operator whose result counts
  };

  void forget_values(const at::Tensor& output) {
    const auto found = origins_.find(memory_of(output));
    if (found != origins_.end()) found->second.is_unwritten = true;
  }

  void look_at_input(Running& running, const at::Tensor& input) const {
    if (const auto name = names_.find(memory_of(input)); name != names_.end()) {
      running.names += ddp::str(running.names.empty() ? "" : ", ", '"', name->second.first, '"');
    }
    if (running.origin.empty() && !has_finite_values(input)) running.origin = origin_of(input);
  }

  void note_result(const at::Tensor& value) {
    const auto& running = running_.back();
    const auto found = origins_.find(memory_of(value));
    const bool is_known = found != origins_.end();
    if (has_finite_values(value)) {
      // Another part of the memory may not be.
      if (is_known && has_finite_values(found->second.value)) origins_.erase(found);
    } else if (!is_known || found->second.is_unwritten) {
      origins_[memory_of(value)] = {
          value, running.origin.empty() ? text_of(value) : running.origin,
          any_of(running_, [](const Running& r) { return gives_unwritten_memory(r.name); })};
    }
  }

  static const void* memory_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

  void add_name(const std::string& name, const at::Tensor& t) {
    if (may_be_infinite(t)) names_[memory_of(t)] = {name, t};
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

  std::unordered_map<const void*, std::pair<std::string, at::Tensor>> names_;  // by memory
  std::unordered_map<const void*, Origin> origins_;                            // by memory
  std::vector<Running> running_;                                               // outermost first
  int64_t count_ = 0;  // of operators that the program called
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
