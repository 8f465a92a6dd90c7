// Where the elements of cut parameters are, and who reads it.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/tensor/cut_model.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/recording_backend.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;

namespace {

std::vector<std::string> names_of(const std::vector<ddp::ParameterLayout>& layouts) {
  std::vector<std::string> names;
  for (const auto& layout : layouts) names.push_back(layout.name);
  return names;
}

}  // namespace

TEST_CASE("the ranks' boxes have each element of a cut model once", "[parallel][layouts][ranks]") {
  const int ranks = GENERATE(1, 2, 4);
  const WholeModel whole;
  // By parameter: how often each element is in a box, or -1 where all ranks have it.
  const auto counts = run_ranks<std::map<std::string, torch::Tensor>>(ranks, [&](const Rank& self) {
    std::map<std::string, torch::Tensor> own;
    const CutModel model(whole, self.group);
    TORCH_CHECK(distance_from_whole(*model, whole) == 0, "the boxes have other elements");
    for (const auto& layout : ddp::layouts_of(*model)) {
      TORCH_CHECK(layout.dtype == torch::kDouble && !layout.partial);
      auto count = torch::zeros(layout.sizes);
      for (const auto& box : layout.boxes) {
        auto view = count;
        for (size_t d = 0; d < box.size.size(); ++d) {
          view = view.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
        }
        view += 1;
      }
      if (layout.sharded_over.empty()) count /= ranks;
      own[name_in_whole(layout.name)] = count;
    }
    return own;
  });
  for (const auto& item : whole->named_parameters()) {
    CAPTURE(item.key());
    auto sum = torch::zeros_like(item.value());
    for (const auto& own : counts) sum += own.at(item.key());
    CHECK(torch::allclose(sum, torch::ones_like(sum)));
  }
}

TEST_CASE("layouts name parameters as the model in a wrapper does", "[parallel][layouts][ranks]") {
  const WholeModel whole;
  const auto faults = run_ranks<std::string>(4, [&](const Rank& self) -> std::string {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    const CutModel model(whole, mesh.group("tp"));
    const auto plain = ddp::layouts_of(*model);
    const ddp::DistributedDataParallel wrapped(
        model, ddp::DistributedDataParallelOptions().process_group(mesh.group("dp")));
    const auto in_wrapper = ddp::layouts_of(*wrapped);
    if (names_of(plain) != names_of(in_wrapper)) return "names";
    if (names_of(plain).size() != model->parameters().size()) return "number";
    for (const auto& layout : in_wrapper) {
      if (layout.replicated_over.back() != mesh.group("dp")) return "replicas of " + layout.name;
    }
    const auto find = [&](const std::string& name) {
      return *std::find_if(
          plain.begin(), plain.end(), [&](const auto& layout) { return layout.name == name; });
    };
    const std::vector<ddp::ProcessGroup> tp{mesh.group("tp")};
    const auto qkv = find("attention.in_proj.weight");
    if (qkv.sharded_over != tp || qkv.boxes.size() != 3) return "qkv";
    if (qkv.boxes[1].offset != std::vector<int64_t>{kWidth + mesh.rank("tp") * kWidth / 2, 0}) {
      return "keys";
    }
    if (!find("down.bias").sharded_over.empty() || find("down.bias").replicated_over != tp) {
      return "a row layer's bias";
    }
    if (!find("norm1.weight").sharded_over.empty()) return "a norm";
    if (find("embedding.weight").sizes != std::vector<int64_t>{kTokens, kWidth}) return "padding";
    return "";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE("replicas of a cut model are compared in what they share", "[parallel][layouts][ranks]") {
  const WholeModel whole;
  const auto faults = run_ranks<std::string>(4, [&](const Rank& self) -> std::string {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    const CutModel model(whole, mesh.group("tp"));
    const auto equal_over = [&](const ddp::ProcessGroup& group) {
      return ddp::replicas_equal(*model, group);
    };
    if (!equal_over(mesh.group("dp")) || !equal_over(mesh.group("tp")) || !equal_over(self.group)) {
      return "equal ones differ";
    }
    const torch::NoGradGuard no_grad;
    if (mesh.rank("tp") == 1) model->up->weight.add_(1);
    if (!equal_over(self.group)) return "what is cut is compared";
    if (self.rank == 3) model->up->weight.add_(1);
    if (mesh.rank("tp") == 1 && equal_over(mesh.group("dp"))) return "a replica's part is not";
    if (mesh.rank("tp") == 0 && !equal_over(mesh.group("dp"))) return "the other part is";
    if (self.rank == 3) model->down->bias.add_(1);
    return equal_over(self.group) ? "a shared bias is not" : "";
  });
  CHECK(faults == std::vector<std::string>(4));
}

TEST_CASE(
    "a wrapper over the ranks of a cut layer is an error", "[parallel][layouts][ranks][errors]") {
  const WholeModel whole;
  const auto errors = errors_of_ranks(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    const CutModel model(whole, mesh.group("tp"));
    const ddp::DistributedDataParallel wrapped(
        model, ddp::DistributedDataParallelOptions().process_group(self.group));
  });
  CHECK_THAT(
      errors, Each(Contains("DistributedDataParallel: expected a group whose ranks have the same "
                            "parameters, got one whose ranks have parts of \"embedding.weight\"")));
}

TEST_CASE("clipping a module counts each element once", "[parallel][layouts][ranks]") {
  const double norm_type = GENERATE(2.0, 1.0, std::numeric_limits<double>::infinity());
  const bool has_mesh = GENERATE(false, true);
  const WholeModel whole;
  uint64_t seed = 50;
  for (auto& p : whole->parameters()) p.mutable_grad() = draw_values(p.sizes().vec(), seed++);
  const auto gradient_of = [&](const ddp::ParameterLayout& layout) {
    // Padding gets the gradient 0, as in training.
    const auto gradient = torch::zeros_like(layout.local);
    const auto all = whole->named_parameters()[name_in_whole(layout.name)].grad();
    const auto views = ddp::views_of_boxes(layout, gradient);
    for (size_t i = 0; i < views.size(); ++i) {
      auto box = all;
      for (int64_t d = 0; d < all.dim(); ++d) {
        const auto& [offset, size] = layout.boxes[i];
        box = box.narrow(d, offset[static_cast<size_t>(d)], size[static_cast<size_t>(d)]);
      }
      views[i].copy_(box);
    }
    return gradient;
  };
  const auto clipped = run_ranks<std::vector<double>>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    const CutModel model(whole, mesh.group("tp"));
    for (auto& layout : ddp::layouts_of(*model)) layout.local.mutable_grad() = gradient_of(layout);
    const auto norm = has_mesh ? ddp::clip_grad_norm_(*model, 0.5, mesh, norm_type)
                               : ddp::clip_grad_norm_(*model, 0.5, norm_type);
    // Now at the limit: nothing changes.
    const auto again = has_mesh ? ddp::clip_grad_norm_(*model, 10, mesh, norm_type)
                                : ddp::clip_grad_norm_(*model, 10, norm_type);
    return std::vector<double>{norm, again, model->down->bias.grad()[0].item<double>()};
  });
  const auto bias_before = whole->down->bias.grad()[0].item<double>();
  const auto expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.5, norm_type);
  CHECK(std::abs(bias_before) > 0);
  for (const auto& of_rank : clipped) {
    CHECK(of_rank == clipped[0]);
    CHECK(of_rank[0] == Approx(expected).epsilon(1e-12));
    CHECK(of_rank[1] == Approx(0.5).epsilon(1e-5));
    CHECK(of_rank[2] == Approx(whole->down->bias.grad()[0].item<double>()).epsilon(1e-9));
  }
}

TEST_CASE("cuts over groups that no job of ours has are believed", "[parallel][layouts]") {
  Events events;
  const auto tp = recording_group(0, 2, events), other = recording_group(0, 2, events);
  const CutModel model(WholeModel(), tp);
  const auto layout = ddp::layouts_of(*model)[0];
  CHECK(ddp::is_cut_over(layout, *tp));
  CHECK(ddp::is_cut_within(layout, *tp));
  CHECK_FALSE(ddp::is_cut_over(layout, *other));  // it may have other processes
  CHECK(ddp::is_cut_within(layout, *other));      // a save finds out
}

TEST_CASE("clipping refuses a mesh that lacks an axis of the cut", "[parallel][layouts][ranks]") {
  const WholeModel whole;
  const auto errors = run_ranks<std::string>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"dp", "tp"}, self.group);
    const CutModel model(whole, mesh.group("tp"));
    return error_of<c10::ValueError>([&] { ddp::clip_grad_norm_(*model, 1.0, mesh[{"dp"}]); });
  });
  CHECK_THAT(
      errors,
      Each(Contains("embedding.weight is cut, got one with 1 of its 2 parts. Pass the whole")));
}

TEST_CASE("clipping refuses a cut over a part of an axis", "[parallel][layouts][ranks][errors]") {
  const WholeModel whole;
  const auto errors = run_ranks<std::string>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({4}, {"all"}, self.group);
    const CutModel model(whole, ddp::split_group(self.rank / 2, 0, self.group));
    return error_of<c10::ValueError>([&] { ddp::clip_grad_norm_(*model, 1.0, mesh); });
  });
  CHECK_THAT(errors, Each(Contains("got one whose axis has 2 of them and 2 others")));
}

TEST_CASE("clipping adds up the stages of a pipeline", "[parallel][layouts][ranks]") {
  const double norm_type = GENERATE(1.0, std::numeric_limits<double>::infinity());
  const auto norms = run_ranks<double>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "tp"}, self.group);
    // The second stage has layers that are cut, and others; the first has whole ones alone.
    torch::nn::Sequential stage(torch::nn::Linear(4, 1));
    if (mesh.rank("pp") == 1) {
      stage->push_back(ddp::ColumnParallelLinear(
          ddp::ColumnParallelLinearOptions(4, 2).process_group(mesh.group("tp")),
          torch::ones({2, 4}), torch::ones({2})));
    }
    for (auto& p : stage->parameters()) p.mutable_grad() = torch::ones_like(p);
    return ddp::clip_grad_norm_(*stage, 100.0, norm_type, {mesh.group("pp")});
  });
  CHECK(norms == std::vector<double>(4, norm_type == 1 ? 20.0 : 1.0));
}

TEST_CASE("clipping knows a group by its ranks", "[parallel][layouts][ranks]") {
  const auto norms = run_ranks<double>(2, [&](const Rank& self) {
    const ddp::ColumnParallelLinear layer(
        ddp::ColumnParallelLinearOptions(4, 2).process_group(self.group), torch::ones({2, 4}),
        torch::ones({2}));
    for (auto& p : layer->parameters()) p.mutable_grad() = torch::ones_like(p);
    return ddp::clip_grad_norm_(*layer, 100.0, 1.0, {ddp::split_group(0, 0, self.group)});
  });
  CHECK(norms == std::vector<double>(2, 10.0));
}
