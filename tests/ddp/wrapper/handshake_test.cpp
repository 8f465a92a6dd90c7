// Ranks with different models: every rank throws the same text.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "support/ranks.h"
#include "support/recording_backend.h"
#include "support/relay_backend.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// A module made of whatever the test registers.
class BagImpl : public torch::nn::Module {
 public:
  at::Tensor forward() { return parameters()[0].sum(); }
};
TORCH_MODULE(Bag);

using Fill = std::function<void(BagImpl&, const Rank&, DistributedDataParallelOptions&)>;

// The text that all ranks throw.
std::string common_error(int size, const Fill& fill) {
  return error_of_all(size, [&](const Rank& self) {
    Bag bag;
    auto options = DistributedDataParallelOptions().process_group(self.group);
    fill(*bag, self, options);
    DistributedDataParallel<Bag> model(bag, options);
  });
}

struct Refused {
  Fill fill;
  std::vector<std::string> texts;  // in the error of all ranks
  int size = 2;
};

void check_texts(const std::vector<Refused>& models) {
  for (const auto& [fill, texts, size] : models) {
    CAPTURE(texts);
    const auto error = common_error(size, fill);
    for (const auto& text : texts) CHECK_THAT(error, ContainsText(text));
  }
}

// Forwards gathers to another backend; has memory of its own to reduce in, or none.
class Memory : public testing::Relay {
 public:
  Memory(c10::intrusive_ptr<c10d::Backend> transport, bool has_memory)
      : Relay("memory", std::move(transport)), has_memory_(has_memory) {}

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return has_memory_; }

 private:
  bool has_memory_;
};

ProcessGroup with_memory(const ProcessGroup& group, bool has_memory) {
  const auto transport = group->getBackend(c10::DeviceType::CPU);
  return group_over(c10::make_intrusive<Memory>(transport, has_memory));
}

const std::string kSubject =
    "DistributedDataParallel: expected every rank to wrap the same model, but ";
const std::string kRemedy =
    ". Build the model and its options from the same configuration on all ranks.";

}  // namespace

TEST_CASE("equal models can be wrapped", "[ranks][ddp]") {
  const int size = GENERATE(1, 2, 3);
  CHECK(common_error(size, [](BagImpl& bag, const Rank&, auto&) {
          bag.register_parameter("w", torch::randn({2, 3}));
          bag.register_buffer("b", torch::randn({4}));
        }).empty());
}

TEST_CASE("buffers of any dtype are broadcast from rank 0", "[ranks][ddp]") {
  const auto dtype = GENERATE(
      at::kShort, at::kBool, at::kUInt16, at::kUInt32, at::kFloat8_e5m2, at::kComplexFloat,
      at::kLong);
  CAPTURE(dtype);
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    const auto own = [&](int number) {
      return at::tensor({self.rank + number, 1, self.rank}).to(dtype);
    };
    Bag bag;
    bag->register_parameter("w", torch::ones({1}));
    bag->register_buffer("counts", own(2));
    bag->register_buffer("more", own(5));
    DistributedDataParallel<Bag> model(
        bag, DistributedDataParallelOptions().process_group(self.group));
    const auto counts = bag->named_buffers()["counts"];
    const auto wrapped = counts.clone();
    counts.copy_(own(7));
    model->forward().backward();  // the next pass shares them again
    model->forward();
    return std::vector<at::Tensor>{
        wrapped.view(at::kByte), counts.view(at::kByte),
        bag->named_buffers()["more"].view(at::kByte)};
  });
  const auto first = [&](int number) {
    return at::tensor({number, 1, 0}).to(dtype).view(at::kByte);
  };
  for (const auto& result : results) {
    CHECK(at::equal(result[0], first(2)));
    CHECK(at::equal(result[1], first(7)));
    CHECK(at::equal(result[2], first(5)));
  }
}

TEST_CASE("the error names every kind of difference between models", "[ranks][errors][ddp]") {
  check_texts(
      {{[](BagImpl& bag, const Rank& self, auto&) {
          bag.register_parameter("w", torch::ones({2}, self.rank ? at::kDouble : at::kFloat));
        },
        {"\"w\" is [2] Float", "[2] Double"}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          const auto w = torch::ones({2, 3, 4, 4});
          bag.register_parameter("w", self.rank ? w.contiguous(at::MemoryFormat::ChannelsLast) : w);
        },
        {"strides [48, 16, 4, 1]", "strides [48, 1, 12, 3]"}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          bag.register_parameter("w", self.rank ? torch::ones({6}) : torch::ones({2, 3}));
        },
        {"is [2, 3] Float", "and [6] Float"}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          bag.register_parameter("v", torch::ones({1}));
          bag.register_parameter("w", torch::ones({1}), /*requires_grad=*/self.rank == 0);
        },
        {"\"w\"", "trained on rank 0", "frozen on rank 1"}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          if (self.rank == 0) bag.register_parameter("a", torch::ones({1}));
          bag.register_parameter("b", torch::ones({1}));
        },
        {"rank 0 has 2 parameters and rank 1 has 1: parameter \"a\"", "is not on rank 1"}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          const std::vector<std::string> names{"a", "b"};
          bag.register_parameter(names[self.rank], torch::ones({1}));
          bag.register_parameter(names[1 - self.rank], torch::ones({1}));
        },
        {"\"a\" comes in another place: where rank 0 has it, rank 1 has parameter \"b\""}},
       {[](BagImpl& bag, const Rank& self, auto&) {
          bag.register_parameter("w", torch::ones({1}));
          bag.register_buffer("mean", torch::ones({self.rank + 1}));
        },
        {"buffer \"mean\" is [1] Float", "and [2] Float"}}});
}

TEST_CASE("the whole error of a difference between models", "[ranks][errors][ddp]") {
  const auto difference = [](int size, const Fill& fill, const std::string& text) {
    CHECK(common_error(size, fill) == kSubject + text + kRemedy);
  };
  difference(
      3,
      [](BagImpl& bag, const Rank& self, auto&) {
        bag.register_parameter("same", torch::ones({1}));
        bag.register_parameter("fc2_weight", torch::ones({10, self.rank == 1 ? 64 : 32}));
      },
      "parameter \"fc2_weight\" is [10, 32] Float, strides [32, 1], on cpu, trained on rank 0 and "
      "[10, 64] Float, strides [64, 1], on cpu, trained on rank 1");
  difference(
      4,
      [](BagImpl& bag, const Rank& self, auto&) {
        bag.register_parameter("a", torch::ones({1}));
        if (self.rank % 2) bag.register_parameter("b", torch::ones({1}));
      },
      "rank 0 has 1 parameters and rank 1 has 2: parameter \"b\" ([1] Float, strides [1], on cpu, "
      "trained) is only on rank 1 (2 of 4 ranks differ from rank 0: 1 3)");
  difference(
      2,
      [](BagImpl& bag, const Rank& self, auto& options) {
        bag.register_parameter("w", torch::ones({1}));
        options.bucket_cap_mb(self.rank + 1);
      },
      "option \"bucket_cap_mb\" is 1 on rank 0 and 2 on rank 1");
  difference(
      2,
      [](BagImpl& bag, const Rank& self, auto& options) {
        bag.register_parameter("w", torch::ones({1}));
        options.process_group(with_memory(self.group, self.rank == 1));
      },
      "option \"buckets in the backend's memory (DDP_DISABLE_COMM_MEM)\" is false on rank 0 and "
      "true on rank 1");
}

TEST_CASE("all ranks throw the error of one rank", "[ranks][errors][ddp]") {
  CHECK(
      common_error(
          3,
          [](BagImpl& bag, const Rank& self, auto&) {
            bag.register_parameter("w", torch::ones({1}), /*requires_grad=*/self.rank != 1);
          }) ==
      "on rank 1 of 3: DistributedDataParallel is not needed when a module doesn't have any "
      "parameter that requires a gradient. Use the module itself.");
  check_texts(
      {{[](BagImpl& bag, const Rank& self, auto& options) {
          bag.register_parameter("w", torch::ones({1}));
          if (self.rank != 1) options.parameters_to_ignore({"v" + std::to_string(self.rank)});
        },
        {"on rank 0 of 3: ", "got \"v0\"", "\non rank 2 of 3: ", "got \"v2\""},
        3},
       {[](BagImpl&, const Rank&, auto&) {}, {"DistributedDataParallel is not needed"}}});
}

TEST_CASE("the others time out when a rank wraps nothing", "[ranks][errors][ddp]") {
  const RanksOptions options{std::chrono::seconds(4)};
  const auto errors = errors_of_ranks(2, options, [](const Rank& self) {
    if (self.rank == 1) {
      self.wait_until_others_end();
      return;
    }
    Bag bag;
    bag->register_parameter("w", torch::ones({1}));
    DistributedDataParallel<Bag>(bag, DistributedDataParallelOptions().process_group(self.group));
  });
  CHECK_THAT(
      errors[0],
      ContainsText(
          "DistributedDataParallel: comparing the ranks' models (every rank has to construct") &&
          ContainsText("failed on rank 0 of 2"));
  CHECK(errors[1].empty());
}

TEST_CASE("unusable modules and options throw", "[ranks][errors][ddp]") {
  using SetOptions = std::function<void(DistributedDataParallelOptions&)>;
  const std::vector<std::pair<SetOptions, std::vector<std::string>>> unusable{
      {[](auto& options) { options.bucket_cap_mb(-1); }, {"bucket_cap_mb", "-1"}},
      {[](auto& options) { options.parameters_to_ignore({"v"}); },
       {"parameters_to_ignore", "\"v\""}},
      {[](auto& options) { options.device_ids({at::kCPU}); }, {"device_ids", "\"w\" is on cpu"}},
      {[](auto& options) {
         options.device_ids({c10::Device("cuda:0"), c10::Device("cuda:1")});
       },
       {"at most one device", "got 2"}}};
  for (const auto& row : unusable) {
    check_texts(
        {{[&](BagImpl& bag, const Rank&, auto& options) {
            bag.register_parameter("w", torch::ones({1}));
            row.first(options);
          },
          row.second, 1}});
  }
  check_texts(
      {{[](BagImpl&, const Rank&, auto&) {},
        {"doesn't have any parameter that requires a gradient"},
        1},
       {[](BagImpl& bag, const Rank& self, auto& options) {
          bag.register_parameter("w", torch::ones({1}));
          if (self.rank == 1) options.stats_every(-1);
        },
        {"stats_every", "-1"}},
       {[](BagImpl& bag, const Rank&, auto&) {
          bag.register_parameter("w", torch::ones({1}));
          bag.register_parameter("tiny", torch::ones({1}).to(at::kFloat8_e4m3fn));
        },
        {"the backend adds up (Byte, ", "got \"tiny\" of Float8_e4m3fn. Train a copy"}},
       {[](BagImpl& bag, const Rank&, auto&) {
          bag.register_parameter("w", torch::ones({1}));
          bag.register_buffer("q", at::quantize_per_tensor(torch::ones({1}), 1, 0, at::kQInt8));
        },
        {"got buffer \"q\" of layout Strided and dtype QInt8"},
        1}});
  CHECK_THROWS_WITH(DistributedDataParallel<Bag>(Bag()), ContainsText("init_process_group"));
  const auto empty = errors_of_ranks(1, [](const Rank& self) {
    DistributedDataParallel<Bag>(
        Bag(nullptr), DistributedDataParallelOptions().process_group(self.group));
  });
  CHECK_THAT(empty[0], ContainsText("empty holder"));
}

}  // namespace ddp
