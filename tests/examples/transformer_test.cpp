// The text, the windows and the model of the transformer's example.
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "examples/transformer/model/model.h"
#include "examples/transformer/sampling.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::error_of;
using ddp::testing::TemporaryFolder;
using transformer::Text;

transformer::Shape tiny() { return {/*context=*/8, /*width=*/8, /*heads=*/2, /*layers=*/2}; }

std::string refused(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "transformer");
  std::ostringstream help;
  try {
    transformer::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
  } catch (const transformer::UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a text's characters are numbers in the order of their codes", "[examples][pure]") {
  const Text text("b→aäb\n", "a file");
  CHECK(text.vocabulary() == 5);  // \n a b ä →
  CHECK(torch::equal(text.numbers(), torch::tensor({2, 4, 1, 3, 2, 0}, torch::kLong)));
  CHECK(text.decode(text.numbers()) == "b→aäb\n");
  CHECK(text.decode(text.encode("ä→")) == "ä→");
  CHECK_THAT(
      error_of([&] { text.encode("abc"); }),
      ContainsText("expected characters of a file, got \"c\""));
}

TEST_CASE("windows follow each other, and the last tenth is held out", "[examples][pure]") {
  const TemporaryFolder folder;
  std::string letters;
  for (int i = 0; i < 50; ++i) letters += static_cast<char>('0' + i);
  const auto text = Text::read(folder.write("text", letters));
  const auto split = transformer::split(text, 4);
  CHECK(split.train.size() == 11);  // of 45
  CHECK(split.held_out.size() == 1);
  const auto batch = split.train.at({1, 10});
  CHECK(text.decode(batch.input.flatten()) == letters.substr(4, 4) + letters.substr(40, 4));
  CHECK(text.decode(batch.target.flatten()) == letters.substr(5, 4) + letters.substr(41, 4));
  CHECK(text.decode(split.held_out.at({0}).input[0]) == letters.substr(45, 4));
  CHECK_THAT(
      error_of([&] { transformer::split(text, 5); }),
      ContainsText("expected at least 60 characters for --context 5") &&
          ContainsText("got 50. Choose"));
}

TEST_CASE("a character's logits do not depend on later characters", "[examples][pure]") {
  torch::manual_seed(1);
  transformer::LanguageModel model(5, tiny());
  model->eval();
  const auto characters = torch::randint(5, {2, 8}, torch::kLong);
  auto changed = characters.clone();
  changed.select(1, 5).add_(1).remainder_(5);
  const auto before = model->forward(characters), after = model->forward(changed);
  CHECK(before.sizes() == at::IntArrayRef({2, 8, 5}));
  CHECK(torch::equal(after.slice(1, 0, 5), before.slice(1, 0, 5)));
  for (int64_t i = 5; i < 8; ++i)
    CHECK_FALSE(torch::equal(after.select(1, i), before.select(1, i)));
  // The rest of the batch does not matter either.
  CHECK(torch::allclose(model->forward(characters.slice(0, 1)), before.slice(0, 1), 1e-4, 1e-6));
}

TEST_CASE(
    "a sample is the prompt and its continuation, which the seed decides", "[examples][pure]") {
  torch::manual_seed(1);
  const Text text("abcdefgh", "letters");
  transformer::Options options;
  options.shape = tiny();
  options.sample = 30;  // beyond the context
  transformer::LanguageModel model(text.vocabulary(), options.shape);
  model->eval();
  const auto next = [&](const at::Tensor& seen) {
    return model->last_logits(model->forward(seen), seen.size(1));
  };
  const auto first = sample(next, text, "ha", options);
  CHECK(first.size() == 32);
  CHECK(first.substr(0, 2) == "ha");
  CHECK(sample(next, text, "ha", options) == first);
  options.seed = 2;
  CHECK(sample(next, text, "ha", options) != first);
  // At a low temperature only the likeliest character is drawn, whatever the seed.
  options.temperature = 1e-4;
  const auto cold = sample(next, text, "ha", options);
  options.seed = 3;
  CHECK(sample(next, text, "ha", options) == cold);
}

TEST_CASE("the transformer reports invalid input in one line", "[examples][errors]") {
  const std::vector<std::vector<const char*>> all = {
      {"--heads", "3"},     {"--warmup", "1000"}, {"--batch-size", "0"}, {"--accumulate", "0"},
      {"--zero", "3"},      {"--dropout", "1"},   {"--clip", "0"},       {"--temperature", "nan"},
      {"--no-such-option"}, {"--tp", "0"},        {"--cp", "0"}};
  for (const auto& arguments : all) {
    CAPTURE(arguments);
    const auto message = refused(arguments);
    CHECK_THAT(message, ContainsText(arguments[0]));
    CHECK_THAT(message, ContainsText("(transformer --help lists the options)"));
    CHECK(message.find('\n') == std::string::npos);
  }
  CHECK_THAT(refused({"--heads", "3"}), ContainsText("expected a divisor of --width 128, got 3"));
  CHECK_THAT(refused({"--resume"}), ContainsText("--checkpoint"));
}

TEST_CASE("options that do not go with --tp or --cp are refused", "[examples][errors]") {
  const std::vector<std::pair<std::vector<const char*>, std::string>> all = {
      {{"--tp", "3"}, "--heads: expected a multiple of --tp 3, got 4"},
      {{"--cp", "3"}, "--context: expected a multiple of 2 * --cp = 6, got 64"},
      {{"--cp", "2", "--backend", "nccl"},
       "--backend: expected one for CPUs with --cp 2, got nccl"}};
  for (const auto& [arguments, text] : all) {
    CHECK_THAT(refused(arguments), ContainsText(text));
  }
  for (const char* option : {"--tp", "--cp"}) {
    CHECK(refused({option, "2", "--zero", "2", "--amp", "--checkpoint-activations"}).empty());
    CHECK(refused({option, "2", "--load", "a", "--checkpoint", "c", "--save", "b"}).empty());
  }
}

TEST_CASE("options that do not go with --pp are refused", "[examples][errors]") {
  const std::vector<std::pair<std::vector<const char*>, std::string>> all = {
      {{"--pp", "4"},
       "--layers: expected at least the 4 stages of --schedule 1f1b with --pp 4, got 3"},
      {{"--pp", "2", "--schedule", "interleaved"},
       "--layers: expected at least the 4 stages of --schedule interleaved with --pp 2, got 3"},
      {{"--pp", "2", "--batch-size", "2"},
       "--batch-size: expected at least --microbatches 4 with --pp 2, got 2"},
      {{"--pp", "2", "--zero", "1"},
       "--zero: expected 0 with --pp 2, where --fsdp divides AdamW's state, got 1"},
      {{"--microbatches", "2"}, "--microbatches: expected --pp of 2 or more beside it, got --pp 1"},
      {{"--schedule", "gpipe"}, "--schedule: expected --pp of 2 or more beside it, got --pp 1"},
      {{"--pp", "2", "--schedule", "other"},
       "--schedule: other not in {gpipe,1f1b,eager,interleaved}"}};
  for (const auto& [arguments, text] : all) {
    CHECK_THAT(refused(arguments), ContainsText(text));
  }
  CHECK(refused({"--pp", "2", "--fsdp", "--amp", "--checkpoint-activations", "--cp", "2"}).empty());
}

TEST_CASE("--elastic and --diloco take whole models", "[examples][errors]") {
  const std::vector<std::pair<std::vector<const char*>, std::string>> all = {
      {{"--diloco", "50", "--zero", "1"},
       "--diloco: expected ranks with whole models on CPUs, got --zero"},
      {{"--elastic", "--tp", "2"}, "--elastic: expected ranks with whole models on CPUs, got --tp"},
      {{"--diloco", "50", "--fsdp"},
       "--diloco: expected ranks with whole models on CPUs, got --fsdp"},
      {{"--diloco", "50", "--backend", "nccl"}, "on CPUs, got --backend nccl"},
      {{"--elastic", "--diloco", "50"}, "--elastic: expected no --diloco beside it, got both"},
      {{"--diloco", "50", "--fragments", "5", "--overlap", "11"},
       "--overlap: expected at most --diloco / --fragments, got 11"},
      {{"--regions", "2"}, "--diloco"},
      {{"--diloco", "50", "--wire", "float16"}, "--wire: float16 not in {float32,bfloat16,int8}"}};
  for (const auto& [arguments, text] : all) {
    CHECK_THAT(refused(arguments), ContainsText(text));
  }
  CHECK(refused({"--elastic", "--amp", "--accumulate", "2", "--checkpoint", "c"}).empty());
  CHECK(refused({"--diloco", "50", "--regions", "2", "--overlap", "50", "--amp"}).empty());
  CHECK(refused({"--diloco", "50", "--checkpoint", "c"}).empty());
}

TEST_CASE("stages have all layers once, and the values of the whole model", "[examples][pure]") {
  auto shape = tiny();
  shape.layers = 5;
  const auto model_of = [&](transformer::Stage stage) {
    torch::manual_seed(3);
    return transformer::LanguageModel(7, shape, transformer::Groups(), false, stage);
  };
  auto whole = model_of({});
  const auto characters = torch::randint(7, {2, 8}, torch::kLong);
  whole->eval();
  for (const int64_t count : {2, 3, 5}) {
    auto names = whole->named_parameters();
    auto x = characters;
    size_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      auto stage = model_of({i, count});
      stage->eval();
      x = stage->forward(x);
      for (const auto& item : stage->named_parameters()) {
        CHECK(torch::equal(item.value(), names[item.key()]));
        ++found;
      }
    }
    CHECK(found == names.size() + 1);  // the table is at both ends
    CHECK(torch::equal(x, whole->forward(characters)));
  }
}
