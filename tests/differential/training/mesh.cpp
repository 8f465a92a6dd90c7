// The ranks in a mesh: stages, replicas, and ranks that share layers.
#include <ddp/device_mesh.h>
#include <ddp/full_state_dict.h>
#include <ddp/functional.h>
#include <ddp/tensor_parallel_rng.h>

#include "differential/run.h"

namespace ddp::differential {

DDP_SOURCE(
    axis, inline Rank axis(const DeviceMesh& mesh, const std::string& name) {
      return {mesh.rank(name), mesh.size(name), mesh.group(name), nullptr};
    });
DDP_SOURCE(
    state_of,
    inline torch::OrderedDict<std::string, at::Tensor> state_of(const torch::nn::Module& module) {
      auto state = module.named_parameters();
      for (const auto& item : module.named_buffers()) state.insert(item.key(), item.value());
      return state;
    });
DDP_SOURCE(
    whole_state,
    /// The whole state, on all of these ranks.
    inline torch::OrderedDict<std::string, at::Tensor> whole_state(
        const torch::nn::Module& module, const Rank& ranks) {
      torch::OrderedDict<std::string, at::Tensor> own;
      for (int to = 0; to < ranks.size; ++to) {
        const auto all = full_state_dict(module, to, ranks.group);
        if (to == ranks.rank) own = all;
      }
      return own;
    });
DDP_SOURCE(
    draw,
    /// What this rank draws outside of a guard, and within two of them. In turn, because the
    /// generator is the process's.
    inline std::vector<at::Tensor> draw(const Rank& world, const Rank& self, const Rank& tp) {
      std::vector<at::Tensor> outside, own;
      for (int turn = 0; turn < world.size; ++turn) {
        barrier(world.group);
        if (turn != world.rank) continue;
        torch::manual_seed(17 + static_cast<uint64_t>(self.rank));
        for (int i = 0; i < 2; ++i) {
          outside.push_back(torch::rand({4}, torch::kDouble));
          const TensorParallelRng guard(tp.group);
          own.push_back(torch::rand({8}, torch::kDouble));
        }
      }
      barrier(world.group);
      return {torch::cat(outside), torch::stack(own)};
    });
DDP_SOURCE(
    all_differ, inline bool all_differ(const at::Tensor& masks) {
      for (int64_t i = 0; i < masks.size(0); ++i) {
        for (int64_t j = 0; j < i; ++j)
          if (at::equal(masks[i], masks[j])) return false;
      }
      return true;
    });

void make_mesh(RankRun& run) {
  if (!run.program.has("mesh") && run.label() != "pipeline") return;
  const auto axes = axes_of(run.program, run.first_step);
  const auto shape =
      std::to_string(axes.pp) + ", " + std::to_string(axes.dp) + ", " + std::to_string(axes.tp);
  run.trace.use("axis");
  run.trace.say(
      "const auto world = self; auto mesh = init_device_mesh({" + shape +
      "}, {\"pp\", \"dp\", \"tp\"}, world.group);");
  const auto mesh =
      init_device_mesh({axes.pp, axes.dp, axes.tp}, {"pp", "dp", "tp"}, run.world.group);
  run.trace.say(
      "self = axis(mesh, \"dp\"); const auto tp = axis(mesh, \"tp\"), pp = axis(mesh, \"pp\");");
  run.self = axis(mesh, "dp"), run.tp = axis(mesh, "tp"), run.pp = axis(mesh, "pp");
}

void set_cut_values(RankRun& run, bool begins_equal) {
  int64_t offset = begins_equal ? 1 : 1 + run.self.rank;
  const std::string own = begins_equal ? "" : " + self.rank";
  const auto labels = run.program.layers();
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto& kind = layer_kinds().at(labels[i]);
    auto& layer = *run.layers[i];
    if (!kind.whole_source.empty()) {
      run.trace.use(kind.whole_source), run.trace.use("state_of");
      const auto seed = std::to_string(offset - (own.empty() ? 0 : run.self.rank)) + own;
      run.trace.say(
          "{ auto whole = std::make_shared<" + kind.whole_source +
          ">(); whole->to(torch::kDouble); set_values(*whole, " + seed + ");");
      auto whole = kind.alone();
      whole->to(torch::kDouble);
      set_values(*whole, offset);
      run.trace.say(
          "load_full_state_dict(*net->children()[" + std::to_string(i) +
          "], state_of(*whole), tp.group); }");
      load_full_state_dict(layer, state_of(*whole), run.tp.group);
      for (const auto& item : layer.named_parameters()) {
        if (run.tp.size > 1) run.parameters_cut.insert(layer_name(i) + "." + item.key());
      }
    }
    offset += 17 * static_cast<int64_t>(layer.named_parameters().size());
  }
}

std::vector<std::pair<std::string, at::Tensor>> gathered(RankRun& run, torch::nn::Module& module) {
  // In a join some replicas have ended.
  const auto all =
      whole_state(module, run.label() == "fsdp" || run.label() == "pipeline" ? run.world : run.tp);
  std::map<std::string, at::Tensor> own;  // of what is not cut: its own values
  for (const auto& item : run.net->named_parameters()) own[plain_name(item.key())] = item.value();
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : all) {
    const auto name = plain_name(item.key());
    if (run.parameters.count(name) == 0) continue;
    const auto found = own.find(name);
    const bool whole = found != own.end() && found->second.sizes() == item.value().sizes();
    result.emplace_back(name, whole ? found->second : item.value());
  }
  return result;
}

void draw_in_turn(RankRun& run, int step) {
  const auto &world = run.world, &self = run.self, &tp = run.tp;
  run.trace.use("draw"), run.trace.use("all_differ");
  run.trace.say("{ const auto drawn = draw(world, self, tp);");
  const auto drawn = draw(world, self, tp);
  run.trace.say(
      "TORCH_CHECK(all_differ(functional::all_gather(drawn[1], 0, world.group)), \"masks are "
      "equal\"); }");
  const auto masks = functional::all_gather(drawn[1], 0, world.group);
  TORCH_CHECK(run.is_pretended || all_differ(masks), "masks are equal");
  note(run.record, std::to_string(step) + " drawn", drawn[0]);
}

}  // namespace ddp::differential
