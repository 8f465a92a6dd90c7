#include "replicas/replica_check.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <deque>
#include <functional>
#include <iomanip>
#include <iterator>
#include <sstream>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <ddp/internal/as_real.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/serialize/archive.h>

namespace ddp {
namespace {

constexpr const char* kSubject = "replicas";
constexpr const char* kOptimizer = "optimizer value";
constexpr const char* kParameter = "parameter";
constexpr const char* kBuffer = "buffer";
const DescribedItem kOwnBuffers{"buffers of this rank", "", ""};
// Separates the form of a value (shape and dtype) from its content (a hash or a number).
constexpr char kContent = '#';

// Compares bits: NaN equals itself, and 0 differs from -0.
uint64_t hash_of(const at::Tensor& tensor) {
  const auto here = tensor.detach().cpu().contiguous();
  return hash_of_bytes(here.const_data_ptr(), here.nbytes());
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return ddp::str("undefined", kContent);
  return ddp::str(tensor.sizes(), " ", tensor.scalar_type(), kContent, hash_of(tensor));
}

std::string form_of(const std::string& value) { return value.substr(0, value.find(kContent)); }

std::string content_of(const std::string& value) { return value.substr(value.find(kContent) + 1); }

// The shortest text that no other double has.
std::string describe(double number) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

/// An option or a part of the state of an optimizer: a number, a tensor, or a list of tensors.
struct OptimizerValue {
  std::string name;  // "lr of parameter group 0", "exp_avg of fc.weight"
  c10::IValue value;
};

using Values = std::vector<OptimizerValue>;

// The values that `write` writes, sorted by key, so that the order is the same on every rank. Empty
// where the program's own class cannot be serialized.
Values serialized_values(const std::function<void(torch::serialize::OutputArchive&)>& write) {
  std::stringstream bytes;
  torch::serialize::OutputArchive out;
  try {
    write(out);
    out.save_to(bytes);
  } catch (const c10::Error&) {
    return {};
  }
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  auto keys = in.keys();
  std::sort(keys.begin(), keys.end());
  Values values;
  for (const auto& key : keys) {
    c10::IValue value;
    if (in.try_read(key, value)) values.push_back({key, value});
  }
  return values;
}

struct ValueCollector {
  Values values;

  void step(const char* name, int64_t value) { values.push_back({name, value}); }
  void count(const char* name, int64_t value) { values.push_back({name, value}); }
  void number(const char* name, double value) { values.push_back({name, value}); }
  void scalar(const char* name, double value) { values.push_back({name, value}); }
  void tensor(const char* name, const at::Tensor& value, bool /*is_required*/) {
    values.push_back({name, value});
  }
  void tensors(const char* name, const std::deque<at::Tensor>& value) {
    values.push_back({name, std::vector<at::Tensor>(value.begin(), value.end())});
  }
};

// Reads LibTorch's own states directly: without a copy, and since LBFGS's cannot be serialized
// after a step.
Values values_of(torch::optim::OptimizerParamState& state) {
  ValueCollector fields;
  const bool is_known = with_kind(state, [&](auto kind, auto& own) {
    visit_state(fields, own, typename decltype(kind)::Options(/*lr=*/1));
  });
  if (is_known) return std::move(fields.values);
  return serialized_values([&](auto& out) { state.serialize(out); });
}

Values values_of(const torch::optim::OptimizerOptions& options) {
  auto values = serialized_values([&](auto& out) { options.serialize(out); });
  if (!values.empty()) return values;
  try {
    return {{"lr", options.get_lr()}};
  } catch (const c10::Error&) {
    return {};  // it has no learning rate
  }
}

void append(Values& values, Values more, const std::string& owner) {
  for (auto& value : more) {
    values.push_back({ddp::str(value.name, " of ", owner), std::move(value.value)});
  }
}

// An optimizer's options and state, by names that do not depend on the rank: options by parameter
// group, then the state of each parameter in the groups' order. For a class that is not LibTorch's,
// the values that its serialization writes; without a serialization, the learning rate. `module`
// gives the parameters' names; parameters of no module are named by their position. The state of
// `ignored` parameters is left out.
Values optimizer_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
    const Names& ignored) {
  sync_step_counts(optimizer);
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  Values options, state;
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto group = ddp::str("parameter group ", g);
    append(options, values_of(groups[g].options()), group);
    const auto& parameters = groups[g].params();
    for (size_t p = 0; p < parameters.size(); ++p) {
      auto* const key = parameters[p].unsafeGetTensorImpl();
      const auto found = optimizer.state().find(key);
      if (found == optimizer.state().end()) continue;
      const auto name = names.find(key);
      const bool is_named = name != names.end();
      if (is_named && ignored.count(name->second)) continue;
      append(
          state, values_of(*found->second),
          is_named ? name->second : ddp::str("parameter ", p, " of ", group));
    }
  }
  options.insert(
      options.end(), std::make_move_iterator(state.begin()), std::make_move_iterator(state.end()));
  return options;
}

void add_value(
    std::vector<ReplicaValue>& values, const std::string& name, const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    values.push_back({{kOptimizer, printable(name), describe(tensor)}, tensor});
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    for (size_t i = 0; i < list.size(); ++i) add_value(values, ddp::str(name, ", ", i), list[i]);
  } else {
    const auto text = value.isDouble() ? describe(value.toDouble()) : ddp::str(value);
    values.push_back(
        {{kOptimizer, printable(name), printable(ddp::str("number", kContent, text))}, {}});
  }
}

/// How far a rank's tensor is from rank 0's.
struct Distance {
  double largest = 0;    // absolute difference of an element
  int64_t elements = 0;  // that differ
};

Distance distance_between(const at::Tensor& own, const at::Tensor& first) {
  const auto bytes = [](const at::Tensor& t) { return t.view({-1, 1}).view(at::kByte); };
  const auto unlike = bytes(own).ne(bytes(first)).any(1);
  const auto numbers = [&](const at::Tensor& t) {
    return as_real(t.view(-1).masked_select(unlike)).to(at::kDouble);
  };
  Distance distance;
  distance.elements = unlike.sum().item<int64_t>();
  if (distance.elements > 0) {
    distance.largest = (numbers(own) - numbers(first)).abs().max().item<double>();
  }
  return distance;
}

std::vector<Distance> distances(
    const at::Tensor& tensor, const ProcessGroup& group, GroupMonitor& monitor) {
  const auto where = [] { return std::string("comparing a tensor of the ranks' replicas"); };
  std::string mine;
  monitor.abort_on_error(where, [&] {
    const auto own = tensor.detach().cpu().contiguous();
    std::vector<at::Tensor> wire{own.view(-1).view(at::kByte).to(
        carrier_device(*group), /*non_blocking=*/false, /*copy=*/true)};
    c10d::BroadcastOptions options;
    options.rootRank = 0;
    monitor.wait(*group->broadcast(wire, options), where);
    const auto first = wire.front().cpu().view(own.scalar_type()).view_as(own);
    const auto distance = distance_between(own, first);
    mine = ddp::str(distance.elements, ' ', describe(distance.largest));
  });
  std::vector<Distance> result;
  for (const auto& text : gather_strings(mine, group, where(), &monitor)) {
    auto& distance = result.emplace_back();
    const auto* const end = text.data() + text.size();
    const auto count = std::from_chars(text.data(), end, distance.elements);
    std::from_chars(count.ptr + 1, end, distance.largest);  // after the space
  }
  return result;
}

Description of_kind(const Description& all, const std::string& kind) {
  Description some;
  for (const auto& item : all) {
    if (item.kind == kind) some.push_back(item);
  }
  return some;
}

std::vector<Description> forms_of(std::vector<Description> by_rank) {
  for (auto& description : by_rank) {
    for (auto& item : description) item.value = form_of(item.value);
  }
  return by_rank;
}

std::vector<size_t> ranks_unlike_first(const std::vector<Description>& by_rank, size_t i) {
  std::vector<size_t> ranks;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank][i].value != by_rank.front()[i].value) ranks.push_back(rank);
  }
  return ranks;
}

// Describes how the content of item `i` differs on `ranks` from rank 0's; its form is the same.
std::string describe_contents(
    const std::vector<Description>& by_rank, size_t i, const std::vector<size_t>& ranks,
    const at::Tensor& tensor, const ProcessGroup& group, GroupMonitor& monitor) {
  const auto others = ranks_text(ranks);
  if (!tensor.defined()) {
    return ddp::str(
        "is ", content_of(by_rank.front()[i].value), " on rank 0 and ",
        content_of(by_rank[ranks.front()][i].value), " on rank ", ranks.front());
  }
  Distance most;
  for (const auto& distance : distances(tensor, group, monitor)) {
    most.elements = std::max(most.elements, distance.elements);
    if (std::isnan(distance.largest) || distance.largest > most.largest) {
      most.largest = distance.largest;
    }
  }
  OutputText amount;
  amount << std::setprecision(3) << most.largest;
  return ddp::str(
      "differs on ", others, " from rank 0's by up to ", amount.str(), " in ", most.elements,
      " of ", tensor.numel(), " elements");
}

// Describes the first difference among the items of one kind; "" where there is none.
std::string describe_kind(
    const std::string& kind, const std::vector<Description>& all,
    const std::vector<ReplicaValue>& values, const ProcessGroup& group, GroupMonitor& monitor) {
  std::vector<Description> by_rank;
  for (const auto& description : all) by_rank.push_back(of_kind(description, kind));
  const auto forms = forms_of(by_rank);
  const auto unlike = ranks_unlike_first(forms);
  if (!unlike.empty()) {
    return describe_item_difference(forms.front(), forms[unlike.front()], unlike.front());
  }
  std::vector<size_t> different;
  for (size_t i = 0; i < by_rank.front().size(); ++i) {
    if (!ranks_unlike_first(by_rank, i).empty()) different.push_back(i);
  }
  if (different.empty()) return {};
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    if (value.item.kind == kind) tensors.push_back(value.tensor);
  }
  const auto i = different.front();
  return ddp::str(
      kind, " \"", by_rank.front()[i].name, "\" ",
      different.size() > 1 ? ddp::str("(the first of ", different.size(), ") ") : "",
      describe_contents(by_rank, i, ranks_unlike_first(by_rank, i), tensors[i], group, monitor));
}

}  // namespace

uint64_t hash_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = tensors.size();
  for (const auto& tensor : tensors) hash = hash * 0x9E3779B97F4A7C15u + hash_of(tensor);
  return hash;
}

std::vector<ReplicaValue> replica_values(const std::vector<StateTensor>& state) {
  std::vector<ReplicaValue> values;
  for (const auto& s : state) {
    values.push_back(
        {{s.is_parameter ? kParameter : kBuffer, printable(s.name), describe(s.tensor)}, s.tensor});
  }
  return values;
}

std::vector<ReplicaValue> replica_values(
    const torch::optim::Optimizer& optimizer, const torch::nn::Module& module,
    const Names& ignored) {
  std::vector<ReplicaValue> values;
  for (const auto& [name, value] : optimizer_values(optimizer, module, ignored)) {
    add_value(values, name, value);
  }
  return values;
}

std::string describe_replica_difference(
    const std::vector<ReplicaValue>& values, Buffers buffers, const std::exception_ptr& error,
    const ProcessGroup& group, GroupMonitor& monitor) {
  Description mine;
  if (buffers == Buffers::Own) mine.push_back(kOwnBuffers);
  for (const auto& value : values) mine.push_back(value.item);
  const auto by_rank = gather_if_hashes_differ(kSubject, mine, error, group, monitor);
  if (by_rank.empty()) return {};
  const bool own_buffers = any_of(by_rank, [](const Description& description) {
    return !description.empty() && description.front().kind == kOwnBuffers.kind;
  });
  std::string text;
  // Optimizer values first: a different learning rate is the reason why parameters differ.
  for (const auto* kind : {kOptimizer, kParameter, kBuffer}) {
    if (own_buffers && kind == kBuffer) continue;
    const auto difference = describe_kind(kind, by_rank, values, group, monitor);
    if (!difference.empty()) text += (text.empty() ? "" : "; ") + difference;
  }
  return text;
}

}  // namespace ddp
