// What full_state_dict and load_full_state_dict refuse.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

/// Parameters and buffers of the usual kind.
struct PlainModelImpl : torch::nn::Module {
  explicit PlainModelImpl(int64_t width = 3, const std::string& norm = "norm") {
    register_module("embedding", torch::nn::Embedding(4, width));
    register_module(norm, torch::nn::BatchNorm1d(width));
    register_module("head", torch::nn::Linear(width, 4));
  }
};

/// A parameter with any layout.
struct OneLayoutImpl : torch::nn::Module, ddp::ShardedModule {
  OneLayoutImpl(
      const ddp::ProcessGroup& group, std::vector<int64_t> sizes, const ddp::TensorBox& box) {
    layout.name = "weight";
    layout.sizes = std::move(sizes);
    layout.local = register_parameter("weight", torch::ones(box.size));
    layout.boxes = {box};
    layout.sharded_over = {group};
  }

  std::vector<ddp::ParameterLayout> layouts() override { return {layout}; }

  ddp::ParameterLayout layout;
};
// The errors of the ranks, which all have to be the same.
std::string common_error(int size, const std::function<void(const Rank&)>& body) {
  return error_of_all(size, kLongTimeout, body);
}

}  // namespace

TEST_CASE("ranks with other names fail together", "[parallel][full_state][ranks][errors]") {
  const auto error = common_error(3, [](const Rank& self) {
    const PlainModelImpl model(3, self.rank == 2 ? "other" : "norm");
    ddp::full_state_dict(model, 0, self.group);
  });
  CHECK_THAT(
      error, ContainsText("full_state_dict: expected every rank to have the same parameters"));
  CHECK_THAT(error, ContainsText("rank 2 of 3 lacks rank 0's \"norm.weight\", \"norm.bias\""));
  CHECK_THAT(error, ContainsText("and has \"other.weight\""));
}

TEST_CASE("ranks with other shapes, ranks or boxes fail", "[parallel][full_state][ranks][errors]") {
  CHECK_THAT(
      common_error(
          2,
          [](const Rank& self) {
            ddp::full_state_dict(PlainModelImpl(3 + self.rank), 0, self.group);
          }),
      ContainsText("full_state_dict: expected embedding.weight to have one shape and dtype, got "
                   "[4, 3] Float on rank 0 and [4, 4] Float on rank 1"));
  CHECK_THAT(
      common_error(
          2,
          [](const Rank& self) { ddp::full_state_dict(PlainModelImpl(), self.rank, self.group); }),
      ContainsText("expected the same rank `to` on all, got 0 on rank 0 and 1 on rank 1 of 2"));
  CHECK_THAT(
      common_error(
          2, [](const Rank& self) { ddp::full_state_dict(PlainModelImpl(), 2, self.group); }),
      ContainsText("expected a rank from 0 to 1, got 2"));
  const auto with_boxes = [](int64_t begin, int64_t count) {
    return common_error(2, [=](const Rank& self) {
      const OneLayoutImpl model(
          self.group, {5},
          self.rank == 0 ? ddp::TensorBox{{0}, {2}} : ddp::TensorBox{{begin}, {count}});
      ddp::full_state_dict(model, 0, self.group);
    });
  };
  CHECK(with_boxes(2, 3).empty());
  CHECK_THAT(
      with_boxes(2, 2),
      ContainsText("full_state_dict: expected an owner of every element of weight [5] Float, got "
                   "owners of 4 of 5. Return the missing boxes"));
  CHECK_THAT(
      with_boxes(1, 4),
      ContainsText("full_state_dict: expected one owner of weight [1:2], got ranks 0 and 1."));
  CHECK_THAT(
      with_boxes(3, 3),
      ContainsText("ParameterLayout: expected boxes within [5] for weight, got [3:6]") &&
          ContainsText("(rank 1 of 2)"));
}

TEST_CASE("a rank that gathers alone is told so", "[parallel][full_state][ranks][errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    if (self.rank == 0) ddp::full_state_dict(PlainModelImpl(), 0, self.group);
    auto tensor = torch::ones({3});
    for (int i = 0; i < 3; ++i) ddp::all_reduce(tensor, self.group);
  });
  for (const auto& error : errors) {
    CHECK_FALSE(error.empty());
    CHECK_THAT(error, ContainsText("full_state_dict"));
  }
}

TEST_CASE(
    "a shared tensor has its names in one order on all ranks",
    "[parallel][full_state][ranks][errors]") {
  const auto from_file = GENERATE(true, false);
  const TemporaryFolder folder;
  Dict values;
  for (const char* name : {"a.weight", "b.weight"}) values.insert(name, torch::ones({4}));
  ddp::save_state_dict(values, folder.file("both.pt"));
  const auto load = [&](bool in_one_order) {
    return common_error(2, [&](const Rank& self) {
      const auto shared = std::make_shared<OneLayoutImpl>(
          self.group, std::vector<int64_t>{4}, ddp::TensorBox{{2 * self.rank}, {2}});
      torch::nn::Module model;
      std::vector<std::string> names{"a", "b"};
      if (!in_one_order && self.rank == 1) std::swap(names[0], names[1]);
      for (const auto& name : names) model.register_module(name, shared);
      if (from_file) {
        ddp::load_full_state_dict(model, folder.file("both.pt"), self.group);
      } else {
        ddp::load_full_state_dict(model, values, self.group);
      }
    });
  };
  CHECK(load(true).empty());
  CHECK_THAT(
      load(false), ContainsText("got \"b.weight\" as the first on rank 1 of 2 and as another"));
}

TEST_CASE("a state that does not fit changes nothing", "[parallel][full_state][ranks][errors]") {
  const TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  Dict state;
  for (const auto& item : PlainModelImpl().named_parameters()) {
    state.insert(item.key(), item.value().detach());
  }
  for (const auto& item : PlainModelImpl().named_buffers()) state.insert(item.key(), item.value());
  const auto differing = [&] {
    Dict dict;
    for (const auto& item : state) {
      if (item.key() == "head.bias") {
        dict.insert("head.shift", item.value());
      } else {
        dict.insert(item.key(), item.key() == "norm.bias" ? torch::ones({7}) : item.value());
      }
    }
    return dict;
  }();
  ddp::save_safetensors(differing, path);
  const bool by_file = GENERATE(false, true);
  std::vector<int> unchanged(2);
  const auto error = common_error(2, [&](const Rank& self) {
    PlainModelImpl model;
    Dict before;
    for (const auto& item : model.named_parameters()) {
      before.insert(item.key(), item.value().detach().clone());
    }
    std::string text = error_of([&] {
      if (by_file) {
        ddp::load_full_state_dict(model, path, self.group);
      } else {
        ddp::load_full_state_dict(model, self.rank == 0 ? differing : Dict(), self.group);
      }
    });
    Dict after;
    for (const auto& item : model.named_parameters())
      after.insert(item.key(), item.value().detach());
    unchanged[static_cast<size_t>(self.rank)] = std::all_of(
        after.begin(), after.end(),
        [&](const auto& item) { return torch::equal(item.value(), before[item.key()]); });
    TORCH_CHECK(text.empty(), text);
  });
  const std::string source = by_file ? "the file" : "the dictionary";
  CHECK(unchanged == std::vector<int>{1, 1});
  CHECK(error.find(by_file ? path : "load_full_state_dict") == 0);
  CHECK_THAT(error, ContainsText(source + " lacks the model's \"head.bias\""));
  CHECK_THAT(error, ContainsText("the model lacks " + source + "'s \"head.shift\""));
  CHECK_THAT(error, ContainsText("\"norm.bias\" is [3] in the model and [7] in " + source));
}

TEST_CASE("ranks that read other files fail together", "[parallel][full_state][ranks][errors]") {
  const TemporaryFolder folder;
  Dict one, two;
  one.insert("weight", torch::ones({2, 2}));
  two.insert("weight", torch::ones({2, 3}));
  ddp::save_safetensors(one, folder.file("0.safetensors"));
  ddp::save_safetensors(two, folder.file("1.safetensors"));
  const auto load = [&](const std::string& second) {
    return common_error(2, [&](const Rank& self) {
      torch::nn::Linear model(torch::nn::LinearOptions(2, 2).bias(false));
      ddp::load_full_state_dict(
          model, folder.file(self.rank == 0 ? "0.safetensors" : second), self.group);
    });
  };
  CHECK(load("0.safetensors").empty());
  CHECK_THAT(
      load("1.safetensors"),
      ContainsText(
          "load_full_state_dict: expected the same file on all ranks, but rank 1 of 2 sees"));
  CHECK_THAT(load("2.safetensors"), ContainsText("No such file") && ContainsText("(rank 1 of 2)"));
  std::ofstream(folder.file("3.safetensors")) << "short";
  CHECK_THAT(load("3.safetensors"), ContainsText("got 5 bytes"));
}
