// One file of a checkpoint of a cut model, without ranks.
#include <fstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/tensor/cut_model.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

ddp::CheckpointerOptions consolidate_options(const Rank& self) {
  return ddp::CheckpointerOptions().process_group(self.group).background(false);
}

void train(CutModel& model, torch::optim::Optimizer& optimizer, int64_t step) {
  optimizer.zero_grad();
  model->forward(tokens_of(step, 4)).backward();
  optimizer.step();
}

/// Trains on two ranks and saves steps 1 to `last`; a counter is saved whole.
Dict save_steps(const std::string& folder, int64_t last) {
  return run_ranks<Dict>(2, [&](const Rank& self) {
    CutModel model(WholeModel(5), self.group);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    int64_t counter = 0;
    ddp::Checkpointer checkpointer(folder, consolidate_options(self));
    checkpointer.add("model", model).add("optimizer", optimizer).add("counter", counter);
    for (int64_t step = 1; step <= last; ++step) {
      train(model, optimizer, step);
      checkpointer.save(step);
    }
    return ddp::full_state_dict(model, 0, self.group);
  })[0];
}

bool is_in(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void put_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

}  // namespace

TEST_CASE("a cut model's checkpoint becomes one file", "[parallel][consolidate][ranks]") {
  const TemporaryFolder folder;
  const auto saved = save_steps(folder.path(), 2);
  const auto path = folder.file(GENERATE(as<std::string>(), "model.pt", "model.safetensors"));
  std::vector<std::string> lines;
  const auto options =
      ddp::ConsolidateOptions().progress([&](const std::string& line) { lines.push_back(line); });
  CHECK(ddp::consolidate_checkpoint(folder.path(), std::nullopt, path, options) == 2);
  CHECK(is_in(lines[0], "checking "));
  CHECK(is_in(lines[0], "model.shard-00000.pt (1 of 2)"));
  CHECK(is_in(lines.back(), "(" + std::to_string(saved.size()) + " of "));
  CHECK(lines.size() == 2 + saved.size());
  const auto gathered = run_ranks<Dict>(1, [&](const Rank& self) {
    CutModel model(WholeModel(90), self.group);
    ddp::load_full_state_dict(model, path, self.group);
    return ddp::full_state_dict(model, 0, self.group);
  })[0];
  CHECK(gathered.size() == saved.size());
  for (const auto& item : saved) CHECK(torch::equal(gathered[item.key()], item.value()));
}

TEST_CASE("a cut optimizer's state becomes one file", "[parallel][consolidate][ranks]") {
  const TemporaryFolder folder;
  save_steps(folder.path(), 2);
  const auto model_file = folder.file("m.pt"), optimizer_file = folder.file("o.pt");
  CHECK(ddp::consolidate_checkpoint(folder.path(), 2, model_file) == 2);
  ddp::consolidate_checkpoint(
      folder.path(), 2, optimizer_file, ddp::ConsolidateOptions().part("optimizer"));
  run_ranks<int>(1, [&](const Rank& self) {
    CutModel by_files(WholeModel(90), self.group), by_checkpoint(WholeModel(91), self.group);
    torch::optim::AdamW first(by_files->parameters(), torch::optim::AdamWOptions(0.5));
    torch::optim::AdamW second(by_checkpoint->parameters(), torch::optim::AdamWOptions(0.5));
    ddp::load_full_state_dict(by_files, model_file, self.group);
    ddp::load_state_dict(first, optimizer_file);
    int64_t counter = 0;
    ddp::Checkpointer checkpointer(folder.path(), consolidate_options(self));
    checkpointer.add("model", by_checkpoint).add("optimizer", second).add("counter", counter);
    checkpointer.load(2);
    train(by_files, first, 3);
    train(by_checkpoint, second, 3);
    for (const auto& item : by_files->named_parameters()) {
      TORCH_CHECK(torch::equal(item.value(), by_checkpoint->named_parameters()[item.key()]));
    }
    return 0;
  });
}

TEST_CASE("a whole part becomes one file, too", "[parallel][consolidate][ranks]") {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2);
  run_ranks<int>(1, [&](const Rank& self) {
    ddp::Checkpointer checkpointer(folder.path(), consolidate_options(self));
    auto layer = model;
    checkpointer.add("net", layer).save(1);
    return 0;
  });
  const auto part = ddp::ConsolidateOptions().part("net");
  ddp::consolidate_checkpoint(folder.path(), 1, folder.file("a.pt"), part);
  CHECK(read_bytes(folder.file("a.pt")) == read_bytes(folder.file("step-00000001/net.pt")));
  ddp::consolidate_checkpoint(folder.path(), 1, folder.file("a.safetensors"), part);
  CHECK(torch::equal(ddp::load_safetensors(folder.file("a.safetensors"))["weight"], model->weight));
}

TEST_CASE("what is not whole is not consolidated", "[parallel][consolidate][ranks][errors]") {
  const TemporaryFolder folder;
  save_steps(folder.path(), 2);
  const auto output = folder.file("out.pt");
  const auto error = [&](std::optional<int64_t> step, const std::string& part = "model") {
    return error_of<c10::Error>([&] {
      ddp::consolidate_checkpoint(
          folder.path(), step, output, ddp::ConsolidateOptions().part(part));
    });
  };
  CHECK_THAT(error(7), ContainsText("expected a checkpoint of step 7") && ContainsText("got 1, 2"));
  CHECK_THAT(
      error(2, "net"), ContainsText("expected a part \"net\"") &&
                           ContainsText("got \"counter\", \"model\", \"optimizer\". Name one"));
  const auto to_safetensors = [&] {
    ddp::consolidate_checkpoint(
        folder.path(), 2, folder.file("o.safetensors"),
        ddp::ConsolidateOptions().part("optimizer"));
  };
  CHECK_THAT(error_of(to_safetensors), ContainsText("Name a file that ends with .pt"));
  CHECK_THAT(
      error_of([&] { ddp::consolidate_checkpoint(folder.file("none"), {}, output); }),
      ContainsText("expected a folder of checkpoints"));

  const auto shard = folder.file("step-00000002/model.shard-00001.pt");
  const auto whole = read_bytes(shard);
  const auto damage = GENERATE(0, 1, 2);
  CAPTURE(damage);
  if (damage == 0) put_bytes(shard, whole.substr(0, whole.size() / 2));
  if (damage == 1) put_bytes(shard, whole.substr(0, 999) + '!' + whole.substr(1000));
  if (damage == 2) remove_all(shard);
  const auto of_step = error(2);
  CHECK_THAT(
      of_step, ContainsText("consolidate_checkpoint: expected step 2 to be whole, but " + shard));
  CHECK_THAT(of_step, ContainsText(damage == 2 ? "is missing" : "is damaged"));
  CHECK(read_bytes(output).empty());
  // Other parts of the step are whole, and so is the step before.
  CHECK(error(2, "counter").empty());
  std::string lines;
  const auto step = ddp::consolidate_checkpoint(
      folder.path(), std::nullopt, output,
      ddp::ConsolidateOptions().progress([&](const std::string& line) { lines += line + "\n"; }));
  CHECK(step == 1);
  CHECK_THAT(lines, ContainsText("left out step 2: " + shard));
  remove_all(folder.file("step-00000001/manifest.json"));
  CHECK_THAT(
      error(std::nullopt),
      ContainsText("expected a whole checkpoint") && ContainsText("has no manifest.json"));
}
