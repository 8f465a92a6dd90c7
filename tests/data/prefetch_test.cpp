#include <ddp/prefetch.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/sampler.h>
#include <torch/torch.h>

#include "data/threads.h"
#include "support/archives.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Indices = std::vector<size_t>;

// A sample is its own index, so that a batch shows the indices that the loader asked for.
struct Identity : torch::data::datasets::BatchDataset<Identity, Indices> {
  explicit Identity(size_t size, std::function<void(size_t)> look = {})
      : size_(size), look_(std::move(look)) {}
  Indices get_batch(c10::ArrayRef<size_t> indices) override {
    if (look_) {
      for (const size_t index : indices) look_(index);
    }
    return indices.vec();
  }
  std::optional<size_t> size() const override { return size_; }
  size_t size_;
  std::function<void(size_t)> look_;
};

auto loader_of(const Identity& dataset, size_t batch_size) {
  return torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      dataset, torch::data::DataLoaderOptions(batch_size));
}

template <typename Loader>
Indices epoch_through(Loader& loader) {
  Indices all;
  for (const auto& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Indices up_to(size_t size) {
  Indices all(size);
  for (size_t i = 0; i < size; ++i) all[i] = i;
  return all;
}

struct OwnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A batch that counts how many of its kind exist.
struct Kept {
  Indices indices;
  Counted counted;
};

Kept kept(const Indices& batch) { return Kept{batch, {}}; }

}  // namespace

TEST_CASE("the loop gets the batches of the inner loader, in its order", "[pure][prefetch]") {
  const int64_t workers = GENERATE(1, 2, 3, 4);
  const auto depth = GENERATE(as<std::optional<int64_t>>(), std::nullopt, 1, 7);
  CAPTURE(workers);
  const auto options = PrefetchOptions().workers(workers).depth(depth);

  auto plain = make_prefetch_loader(loader_of(Identity(50), 3), options);
  for (int epoch = 0; epoch < 3; ++epoch) CHECK(epoch_through(*plain) == up_to(50));

  // A transform that takes longer for some batches than for others.
  const auto negated = [](const Indices& batch) {
    auto x = torch::ones({batch[0] % 4 == 0 ? 64 : 2, 64});
    for (int i = 0; i < 10; ++i) x = x.mm(torch::eye(64));
    std::vector<double> out;
    for (const size_t index : batch)
      out.push_back(-static_cast<double>(index) * x[0][0].item<double>());
    return out;
  };
  auto transformed = make_prefetch_loader(loader_of(Identity(50), 3), negated, options);
  std::vector<double> all;
  for (const auto& batch : *transformed) all.insert(all.end(), batch.begin(), batch.end());
  REQUIRE(all.size() == 50);
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == -static_cast<double>(i));
}

TEST_CASE("a sampler's epoch is drawn when a pass begins", "[pure][prefetch]") {
  const size_t inner_workers = GENERATE(0, 2);
  CAPTURE(inner_workers);
  DistributedSampler sampler(10, DistributedSamplerOptions().rank(0).num_replicas(3));
  auto loader = make_prefetch_loader(
      torch::data::make_data_loader(
          Identity(10), sampler, torch::data::DataLoaderOptions(3).workers(inner_workers)),
      PrefetchOptions().workers(2));
  sampler.set_epoch(1);
  CHECK(epoch_through(*loader) == Indices{5, 2, 9, 4});
  sampler.set_epoch(2);
  CHECK(epoch_through(*loader) == Indices{8, 5, 0, 3});
  sampler.set_epoch(0);
  CHECK(epoch_through(*loader) == Indices{4, 5, 0, 2});
}

TEST_CASE(
    "any type with begin and end is a loader, and a container keeps its batches",
    "[pure][prefetch]") {
  std::vector<Indices> stored{{0, 1}, {2}, {3, 4, 5}};
  auto by_value = make_prefetch_loader(stored);
  auto by_pointer = make_prefetch_loader(&stored, PrefetchOptions().workers(2));
  for (int epoch = 0; epoch < 2; ++epoch) {
    CHECK(epoch_through(*by_value) == up_to(6));
    CHECK(epoch_through(*by_pointer) == up_to(6));
  }
  CHECK(stored.back() == Indices{3, 4, 5});
  auto nothing = make_prefetch_loader(std::vector<Indices>());
  CHECK(nothing->begin() == nothing->end());
}

TEST_CASE("batches are prepared while the loop is busy, depth ahead", "[pure][prefetch]") {
  const auto [workers, depth] = GENERATE(table<int64_t, std::optional<int64_t>>(
      {{1, std::nullopt}, {1, 1}, {2, 5}, {3, std::nullopt}}));
  CAPTURE(workers);
  const size_t ahead = static_cast<size_t>(depth.value_or(workers + 1));
  Count drawn;
  Count asked;
  std::atomic<int> too_many{0};
  const auto look = [&](size_t) {
    if (drawn.raise() > asked.value() + ahead) ++too_many;
  };
  auto loader = make_prefetch_loader(
      loader_of(Identity(200, look), 1), PrefetchOptions().workers(workers).depth(depth));
  asked.raise();
  auto batch = loader->begin();
  for (size_t i = 0; i + 1 + ahead < 200; ++i) {
    REQUIRE((*batch)[0] == i);
    REQUIRE(drawn.wait_for(i + 1 + ahead));  // before the loop asks for more
    asked.raise();
    ++batch;
  }
  CHECK(too_many == 0);
}

TEST_CASE("several workers transform at the same time", "[pure][prefetch]") {
  Count inside;
  std::atomic<int> alone{0};
  const auto together = [&](Indices batch) {
    inside.raise();
    if (!inside.wait_for(2)) ++alone;  // continues only when the other one has come in too
    return batch;
  };
  auto loader =
      make_prefetch_loader(loader_of(Identity(2), 1), together, PrefetchOptions().workers(2));
  CHECK(epoch_through(*loader) == up_to(2));
  CHECK(alone == 0);
}

TEST_CASE("an error is thrown unchanged in place of its batch", "[errors][prefetch]") {
  const int64_t workers = GENERATE(1, 2, 4);
  const bool in_dataset = GENERATE(false, true);
  CAPTURE(workers, in_dataset);
  const auto threads_before = thread_count();
  bool broken = true;
  const OwnError* thrown = nullptr;
  const auto fail_at_7 = [&](size_t index) {
    if (index != 7 || !broken) return;
    try {
      throw OwnError("no 7");
    } catch (const OwnError& error) {
      thrown = &error;
      throw;
    }
  };
  const auto pick = [&](Indices batch) {
    if (!in_dataset) fail_at_7(batch[0]);
    return batch;
  };
  const auto look = [&](size_t index) {
    if (in_dataset) fail_at_7(index);
  };
  auto loader = make_prefetch_loader(
      loader_of(Identity(20, look), 1), pick, PrefetchOptions().workers(workers));

  Indices seen;
  auto batch = loader->begin();
  try {
    for (; batch != loader->end(); ++batch) seen.push_back((*batch)[0]);
    FAIL("no error came");
  } catch (const OwnError& error) {
    CHECK(std::string(error.what()) == "no 7");
    CHECK(&error == thrown);  // the same object
  }
  CHECK(seen == up_to(7));
  CHECK(threads_left(threads_before));
  // The pass is over.
  ++batch;
  CHECK(batch == loader->end());

  broken = false;
  CHECK(epoch_through(*loader) == up_to(20));
}

TEST_CASE("an error of the first batch is thrown at its first use", "[errors][prefetch]") {
  const auto refuse = [](Indices batch) -> Indices {
    TORCH_CHECK(batch.empty(), "not this one");
    return batch;
  };
  auto loader = make_prefetch_loader(loader_of(Identity(3), 1), refuse);
  auto batch = loader->begin();
  CHECK_THROWS_WITH(*batch, ContainsText("not this one"));
}

TEST_CASE("a loop may end early and begin again", "[pure][prefetch]") {
  const int64_t workers = GENERATE(1, 2, 4);
  CAPTURE(workers);
  const auto threads_before = thread_count();
  auto loader = make_prefetch_loader(
      loader_of(Identity(100), 1), kept, PrefetchOptions().workers(workers).depth(6));
  for (size_t stop_at : {0, 1, 10, 98, 99, 100}) {
    Indices seen;
    for (const auto& batch : *loader) {
      seen.push_back(batch.indices[0]);
      if (batch.indices[0] == stop_at) break;
    }
    CHECK(seen == up_to(std::min<size_t>(stop_at + 1, 100)));
    // Nothing continues after the loop, which may now call the sampler.
    CHECK(threads_left(threads_before));
    CHECK(Counted::alive() == 0);
  }
}

TEST_CASE("a loop may end by an exception of the user", "[pure][prefetch]") {
  const auto threads_before = thread_count();
  auto loader =
      make_prefetch_loader(loader_of(Identity(100), 1), kept, PrefetchOptions().workers(2));
  const auto loop = [&] {
    for (const auto& batch : *loader) {
      if (batch.indices[0] == 3) throw OwnError("the loop's");
    }
  };
  CHECK_THROWS_AS(loop(), OwnError);
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 0);
}

TEST_CASE("destroyed in the middle, a loader leaves no thread and no batch", "[pure][prefetch]") {
  const int64_t workers = GENERATE(1, 3);
  CAPTURE(workers);
  const auto threads_before = thread_count();
  Count drawn;
  const auto look = [&](size_t) { drawn.raise(); };
  auto loader = make_prefetch_loader(
      loader_of(Identity(100, look), 1), kept, PrefetchOptions().workers(workers).depth(5));
  auto batch = loader->begin();
  CHECK((*batch).indices[0] == 0);
  REQUIRE(drawn.wait_for(6));
  CHECK(thread_count() > threads_before);
  loader.reset();
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 1);  // the iterator's own
}

TEST_CASE("an iterator of a pass that is over throws an error", "[errors][prefetch]") {
  auto loader = make_prefetch_loader(loader_of(Identity(5), 1));
  auto old = loader->begin();
  CHECK((*old)[0] == 0);
  auto current = loader->begin();
  CHECK_THROWS_WITH(
      ++old, ContainsText("PrefetchLoader: expected an iterator of the pass that is on, got one of "
                          "a pass that a later begin(), or the end of the loader, has ended. Use "
                          "what the last begin() returned."));
  CHECK((*current)[0] == 0);
  ++current;
  CHECK((*current)[0] == 1);
  loader.reset();
  CHECK_THROWS_WITH(++current, ContainsText("the end of the loader"));
}

TEST_CASE(
    "a torch loader with workers inside refuses to begin in the middle", "[errors][prefetch]") {
  auto loader = make_prefetch_loader(torch::data::make_data_loader(
      Identity(100), torch::data::samplers::SequentialSampler(100),
      torch::data::DataLoaderOptions(1).workers(2)));
  for (const auto& batch : *loader) {
    CHECK(batch == Indices{0});
    break;
  }
  CHECK_THROWS_WITH(loader->begin(), ContainsText("another iterator is not yet exhausted"));
}

TEST_CASE("a loop that resumes loses no sample that was drawn ahead", "[pure][prefetch]") {
  const auto make_sampler = [] {
    return ddp::DistributedSampler(
        50, ddp::DistributedSamplerOptions().rank(0).num_replicas(1).seed(3));
  };
  const auto make_loader = [](ddp::DistributedSampler& sampler) {
    return make_prefetch_loader(
        torch::data::make_data_loader(Identity(50), sampler, /*options=*/4),
        PrefetchOptions().workers(2).depth(5).on_consumed(
            [&sampler](size_t samples) { sampler.consume(samples); }));
  };
  auto whole_sampler = make_sampler();
  const auto whole = epoch_through(*make_loader(whole_sampler));

  for (const size_t stop_after : {0, 1, 3}) {
    CAPTURE(stop_after);
    auto sampler = make_sampler();
    auto loader = make_loader(sampler);
    Indices seen;
    std::string file;
    size_t batches = 0;
    for (const auto& batch : *loader) {
      if (batches++ == stop_after) {
        file = bytes_of_archive(sampler);
        break;
      }
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
    auto resumed = make_sampler();
    auto archive = archive_of(file);
    resumed.load(archive);
    for (const size_t index : epoch_through(*make_loader(resumed))) seen.push_back(index);
    CHECK(seen == whole);
  }
}

TEST_CASE("on_consumed gets the samples that the loop is done with", "[pure][prefetch]") {
  const int64_t workers = GENERATE(1, 3);
  CAPTURE(workers);
  Indices consumed;
  std::thread::id thread;
  const auto options = PrefetchOptions().workers(workers).depth(9).on_consumed([&](size_t samples) {
    consumed.push_back(samples);
    thread = std::this_thread::get_id();
  });
  // The transform halves batches: the count is of the samples that the sampler gave.
  const auto half = [](const Indices& batch) {
    return Indices(batch.begin(), batch.begin() + batch.size() / 2);
  };
  auto loader = make_prefetch_loader(loader_of(Identity(10), 4), half, options);
  Indices expected{0};
  for (const auto& batch : *loader) {
    CHECK(consumed == expected);  // without the current batch, however many are drawn ahead
    expected.push_back(batch.size() == 1 ? 2 : 4);
  }
  CHECK(consumed == Indices{0, 4, 4, 2});
  CHECK(thread == std::this_thread::get_id());

  // A batch in which the loop ended early does not count.
  consumed.clear();
  for (auto batch = loader->begin(); consumed.size() < 2; ++batch) CHECK((*batch)[0] == 0);
  CHECK(consumed == Indices{0, 4});
  CHECK(epoch_through(*loader).size() == 5);
  CHECK(consumed == Indices{0, 4, 0, 4, 4, 2});
}

TEST_CASE(
    "workers use the state of the loop's thread, each on one compute thread", "[pure][prefetch]") {
  const int threads_of_loop = at::get_num_threads();
  at::set_num_threads(3);
  struct Seen {
    bool grad = true;
    bool inference = true;
    int limit = 0;
    bool alone = false;
  };
  const auto threads_before = thread_count();
  const auto look = [&](const Indices&) {
    at::parallel_for(0, 8, 1, [](int64_t, int64_t) {});  // compiled here, not in LibTorch
    const auto x = torch::ones({500, 500});
    (x + 1).mm(x);  // uses OpenMP, and MKL
    return Seen{
        at::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), at::get_num_threads(),
        thread_count() <= threads_before + 2};
  };
  auto loader = make_prefetch_loader(loader_of(Identity(4), 1), look, PrefetchOptions().workers(2));
  for (const auto& seen : *loader) {
    CHECK(seen.grad);
    CHECK_FALSE(seen.inference);
    CHECK(seen.limit == 1);
    CHECK(seen.alone);
  }
  {
    const at::NoGradGuard no_grad;
    for (const auto& seen : *loader) CHECK_FALSE(seen.grad);
  }
  {
    const c10::InferenceMode inference;
    for (const auto& seen : *loader) CHECK(seen.inference);
  }
  // No other thread is limited: neither the loop's, nor one that starts later.
  int elsewhere = 0;
  std::thread([&] { elsewhere = at::get_num_threads(); }).join();
  CHECK(elsewhere == 3);
  CHECK(at::get_num_threads() == 3);
  at::set_num_threads(threads_of_loop);
}

}  // namespace ddp
