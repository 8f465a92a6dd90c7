#include <ddp/averaged_model.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/module_tensors.h>

#include "averaged_model/average.h"
#include "averaged_model/batch_norms.h"

namespace ddp {
namespace {

constexpr const char* kCount = "n_averaged";
constexpr const char* kModule = "module";

/// The module of a dotted name's owner below `root`, which is made where there is none.
torch::nn::Module& owner_in(torch::nn::Module& root, const std::string& name) {
  auto* owner = &root;
  size_t begin = 0;
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', begin)) {
    const auto part = name.substr(begin, dot - begin);
    const auto children = owner->named_children();
    const auto* child = children.find(part);
    owner = child != nullptr
                ? child->get()
                : owner->register_module(part, std::make_shared<torch::nn::Module>(part)).get();
    begin = dot + 1;
  }
  return *owner;
}

std::string last_part_of(const std::string& name) { return name.substr(name.rfind('.') + 1); }

std::unordered_set<const void*> parameters_in(const torch::nn::Module& module) {
  std::unordered_set<const void*> found;
  for (const auto& parameter : module.parameters()) found.insert(parameter.unsafeGetTensorImpl());
  return found;
}

void check_options(const AveragedModelOptions& options) {
  const auto& decay = options.ema();
  DDP_CHECK_VALUE(
      !decay || (*decay >= 0 && *decay <= 1),
      "AveragedModel: expected 0 <= decay <= 1 in ema, got ", decay.value_or(0), ".");
  DDP_CHECK_VALUE(
      decay || !options.warmup(),
      "AveragedModel: expected ema for warmup, got the mean with equal weights. Set ema(0.999), or "
      "leave warmup out.");
}

}  // namespace

AveragedModel::AveragedModel(torch::nn::Module& module, const AveragedModelOptions& options)
    : torch::nn::Module("AveragedModel"),
      source_(module),
      owner_(module.weak_from_this().lock()),
      options_(options) {
  check_options(options_);
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  const auto on = options_.device().value_or(c10::kCPU);
  n_averaged_ = register_buffer(kCount, at::zeros({}, at::device(on).dtype(at::kLong)));
  auto& root = *register_module(kModule, std::make_shared<torch::nn::Module>(kModule));
  const auto parameters = parameters_in(module);
  std::vector<std::pair<size_t, std::pair<std::string, at::Tensor>>> by_place;
  for (const auto& found : tensors_of_module(module)) {
    const auto& value = found.tensor;
    const bool is_buffer = parameters.count(value.unsafeGetTensorImpl()) == 0;
    auto average =
        at::empty_like(value, value.options().device(options_.device().value_or(value.device())));
    average.copy_(value);
    for (size_t i = 0; i < found.names.size(); ++i) {
      const auto& name = found.names[i];
      auto& owner = owner_in(root, name);
      if (is_buffer) {
        owner.register_buffer(last_part_of(name), average);
      } else {
        owner.register_parameter(last_part_of(name), average, /*requires_grad=*/false);
      }
      by_place.push_back({found.places[i], {name, average}});
    }
    items_.push_back({found.names[0], value, average, is_buffer});
  }
  std::sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  for (auto& [place, named] : by_place) named_.push_back(std::move(named));
}

AveragedModel::~AveragedModel() = default;

int64_t AveragedModel::n_averaged() const { return n_averaged_.item<int64_t>(); }

void AveragedModel::check_not_applied(const char* call) const {
  DDP_CHECK(
      !is_applied_, "AveragedModel: expected no guard of apply() during ", call,
      "(), got one, so that the model has the averages. End the guard before.");
}

// A unit that is gathered has the whole in the place of this rank's elements.
void AveragedModel::check_sizes(const char* call) const {
  for (const auto& item : items_) {
    DDP_CHECK_VALUE(
        item.value.sizes() == item.average.sizes() &&
            item.value.scalar_type() == item.average.scalar_type(),
        "AveragedModel: expected ", item.name, " in ", call, "() as it was at construction, ",
        item.average.sizes(), " ", item.average.scalar_type(), ", got ", item.value.sizes(), " ",
        item.value.scalar_type(),
        ". Construct it after the model has its dtypes, and call it outside of forward, unshard() "
        "and SummonFullParams.");
  }
}

void AveragedModel::update() {
  check_not_applied("update");
  check_sizes("update");
  const c10::NoGradGuard no_grad;
  const auto count = n_averaged();
  AveragePairs averaged;
  AveragePairs copied;
  for (const auto& item : items_) {
    auto& pairs = count == 0 || (item.is_buffer && !options_.use_buffers()) ? copied : averaged;
    pairs.averages.push_back(item.average);
    pairs.values.push_back(item.value);
  }
  copy_values(copied);
  auto decay = options_.ema();
  if (decay && options_.warmup()) decay = decay_in_warmup(*decay, count);
  average_values(on_devices_of_averages(averaged), count, decay);
  n_averaged_.fill_(count + 1);
}

AppliedAverage AveragedModel::apply() { return AppliedAverage(*this); }

void AveragedModel::update_bn_by(
    const std::function<void()>& pass, const std::optional<ProcessGroup>& group) {
  check_not_applied("update_bn");
  const c10::NoGradGuard no_grad;
  const auto applied = apply();
  const AveragingBatchNorms norms(source_);
  pass();
  if (group) norms.combine(*group);
  norms.check_had_batches();
  AveragePairs buffers;
  for (const auto& item : items_) {
    if (!item.is_buffer) continue;
    buffers.averages.push_back(item.average);
    buffers.values.push_back(item.value);
  }
  copy_values(buffers);
}

torch::OrderedDict<std::string, at::Tensor> AveragedModel::state_dict() const {
  torch::OrderedDict<std::string, at::Tensor> dict("state_dict");
  dict.insert(kCount, n_averaged_);
  for (const auto& [name, average] : named_) {
    dict.insert(std::string(kModule) + "." + name, average.detach());
  }
  return dict;
}

std::vector<ParameterLayout> AveragedModel::layouts() {
  LayoutsByParameter known;
  add_layouts_of(source_, known);
  std::vector<ParameterLayout> layouts;
  for (const auto& item : items_) {
    const auto found = known.find(item.value.unsafeGetTensorImpl());
    if (found == known.end()) continue;
    auto layout = found->second;
    layout.name = std::string(kModule) + "." + layout.name;
    layout.local = item.average;
    layouts.push_back(std::move(layout));
  }
  return layouts;
}

AppliedAverage::AppliedAverage(AveragedModel& average) : average_(&average) {
  average.check_not_applied("apply");
  average.check_sizes("apply");
  const c10::NoGradGuard no_grad;
  AveragePairs into_model;
  for (const auto& item : average.items_) {
    kept_.push_back(item.value.detach().clone());
    into_model.averages.push_back(item.value.detach());
    into_model.values.push_back(item.average);
  }
  copy_values(into_model);
  average.is_applied_ = true;
}

void AppliedAverage::restore() {
  if (average_ == nullptr) return;
  auto& average = *std::exchange(average_, nullptr);
  average.is_applied_ = false;
  const c10::NoGradGuard no_grad;
  AveragePairs into_model;
  for (const auto& item : average.items_) into_model.averages.push_back(item.value.detach());
  into_model.values = std::exchange(kept_, {});
  copy_values(into_model);
}

AppliedAverage::~AppliedAverage() {
  try {
    restore();
  } catch (const std::exception& error) {
    TORCH_WARN("AveragedModel: the model was not restored after apply(): ", error.what());
  }
}

}  // namespace ddp
