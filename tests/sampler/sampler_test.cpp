#include <ddp/sampler.h>

#include <chrono>
#include <future>
#include <sstream>
#include <string>

#include <ddp/process_group.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "drawing.h"
#include "support/catch.h"

namespace {

using ddp::DistributedSampler;
using ddp::DistributedSamplerOptions;

DistributedSamplerOptions of_rank(int64_t rank, int64_t num_replicas) {
  return DistributedSamplerOptions().rank(rank).num_replicas(num_replicas);
}

// A sample is its own index, so that a batch shows the indices that the loader asked for.
struct Identity : torch::data::datasets::BatchDataset<Identity, Indices> {
  explicit Identity(size_t size) : size_(size) {}
  Indices get_batch(c10::ArrayRef<size_t> indices) override { return indices.vec(); }
  std::optional<size_t> size() const override { return size_; }
  size_t size_;
};

template <typename Loader>
Indices epoch_through(Loader& loader) {
  Indices all;
  for (const auto& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

}  // namespace

TEST_CASE("next returns the share in batches and then nothing", "[sampler][pure]") {
  DistributedSampler sampler(10, of_rank(0, 3));
  CHECK(sampler.size() == 4);
  sampler.reset();
  CHECK(sampler.next(3) == Indices{4, 5, 0});
  CHECK(sampler.next(3) == Indices{2});
  CHECK_FALSE(sampler.next(3).has_value());
  CHECK_FALSE(sampler.next(3).has_value());
}

TEST_CASE("without a reset, next starts the epoch that was set", "[sampler][pure]") {
  DistributedSampler sampler(10, of_rank(0, 3));
  sampler.set_epoch(1);
  CHECK(rest(sampler) == Indices{5, 2, 9, 4});
}

TEST_CASE("an empty share ends at once", "[sampler][pure]") {
  DistributedSampler sampler(2, of_rank(5, 8).drop_last(true));
  sampler.reset();
  CHECK(sampler.size() == 0);
  CHECK_FALSE(sampler.next(1).has_value());
}

TEST_CASE("set_epoch takes effect at the next reset", "[sampler][pure]") {
  DistributedSampler sampler(10, of_rank(0, 3));
  sampler.reset();
  CHECK(sampler.next(1) == Indices{4});
  sampler.set_epoch(2);
  CHECK(sampler.epoch() == 2);
  CHECK(rest(sampler) == Indices{5, 0, 2});
  CHECK(epoch_of(sampler) == Indices{8, 5, 0, 3});
  CHECK(epoch_of(sampler) == Indices{8, 5, 0, 3});
}

TEST_CASE("a data loader draws the epoch set on the user's sampler", "[sampler][pure]") {
  const size_t workers = GENERATE(0, 2);
  CAPTURE(workers);
  DistributedSampler sampler(10, of_rank(0, 3));
  auto loader = torch::data::make_data_loader(
      Identity(10), sampler, torch::data::DataLoaderOptions(3).workers(workers));

  sampler.set_epoch(1);  // before the first begin()
  CHECK(epoch_through(*loader) == Indices{5, 2, 9, 4});
  sampler.set_epoch(2);
  CHECK(epoch_through(*loader) == Indices{8, 5, 0, 3});
  sampler.set_epoch(0);
  CHECK(epoch_through(*loader) == Indices{4, 5, 0, 2});
}

TEST_CASE("reset takes a new size of the dataset and keeps it", "[sampler][pure]") {
  DistributedSampler sampler(7, of_rank(1, 3).shuffle(false));
  CHECK(epoch_of(sampler) == Indices{1, 4, 0});
  sampler.reset(10);
  CHECK(sampler.size() == 4);
  CHECK(rest(sampler) == Indices{1, 4, 7, 0});
  CHECK(epoch_of(sampler) == Indices{1, 4, 7, 0});
}

TEST_CASE(
    "a loaded sampler continues after the last sample that next returned", "[sampler][pure]") {
  DistributedSampler sampler(100, of_rank(1, 3).seed(5));
  sampler.set_epoch(7);
  const auto whole = epoch_of(sampler);
  sampler.reset();
  sampler.next(10);

  DistributedSampler resumed(100, of_rank(1, 3).seed(5));
  auto loader = torch::data::make_data_loader(Identity(100), resumed, /*options=*/4);
  load(resumed, saved(sampler));
  CHECK(resumed.epoch() == 7);
  const Indices remaining(whole.begin() + 10, whole.end());

  SECTION("through a loader, whose begin() resets the sampler") {
    CHECK(epoch_through(*loader) == remaining);
    CHECK(epoch_through(*loader) == whole);
  }
  SECTION("by next alone") { CHECK(rest(resumed) == remaining); }
  SECTION("also when the loop sets the epoch that it resumes") {
    resumed.set_epoch(7);
    CHECK(epoch_of(resumed) == remaining);
  }
  SECTION("but from the front of another epoch") {
    resumed.set_epoch(8);
    sampler.set_epoch(8);
    CHECK(epoch_of(resumed) == epoch_of(sampler));
  }
  SECTION("also from the front when a reset is not followed by a draw") {
    resumed.reset();
    CHECK(epoch_of(resumed) == remaining);
  }
  SECTION("and saved again before it starts, its state is the same") {
    DistributedSampler again(100, of_rank(1, 3).seed(5));
    load(again, saved(resumed));
    CHECK(epoch_of(again) == remaining);
  }
}

TEST_CASE("rank 0's archive serves the other ranks", "[sampler][pure]") {
  DistributedSampler saver(10, of_rank(0, 3));
  saver.reset();
  saver.next(2);
  DistributedSampler other(10, of_rank(2, 3));
  load(other, saved(saver));
  CHECK(epoch_of(other) == Indices{6, 1});
}

TEST_CASE("an epoch saved at its end, where samples were repeated, is over", "[sampler][pure]") {
  DistributedSampler saver(10, of_rank(1, 3));
  CHECK(epoch_of(saver).size() == 4);  // 12 of 10 samples
  DistributedSampler other(10, of_rank(0, 2));
  load(other, saved(saver));
  CHECK(epoch_of(other).empty());
}

TEST_CASE(
    "an epoch that set_epoch chose starts at its front after save and load", "[sampler][pure]") {
  DistributedSampler saver(10, of_rank(0, 3));
  epoch_of(saver);
  saver.set_epoch(1);
  DistributedSampler other(10, of_rank(0, 3));
  load(other, saved(saver));
  CHECK(epoch_of(other) == Indices{5, 2, 9, 4});
}

TEST_CASE("load refuses an archive whose position has another meaning", "[sampler][errors]") {
  DistributedSampler saver(10, of_rank(0, 3));
  saver.reset();
  saver.next(1);

  DistributedSampler other(11, of_rank(0, 3));
  CHECK_THROWS_AS(load(other, saved(saver)), c10::ValueError);
  CHECK(
      error_of<c10::Error>([&] { load(other, saved(saver)); }) ==
      "DistributedSampler::load: expected dataset_size=10 as when it was saved, got 11. Construct "
      "the sampler as it was, or call set_epoch() instead of load() to start that epoch over.");
  CHECK(epoch_of(other).size() == 4);

  const auto refused = [&](const DistributedSamplerOptions& options, size_t size) {
    DistributedSampler sampler(size, options);
    return error_of<c10::Error>([&] { load(sampler, saved(saver)); });
  };
  CHECK_THAT(refused(of_rank(0, 3).shuffle(false), 10), ContainsText("shuffle=1"));
  CHECK_THAT(refused(of_rank(0, 3).seed(9), 10), ContainsText("seed=0"));
  CHECK_THAT(refused(of_rank(0, 3).drop_last(true), 10), ContainsText("drop_last=0"));
  CHECK(refused(of_rank(2, 3), 10).empty());
  CHECK(refused(of_rank(0, 2), 10).empty());
}

TEST_CASE("load refuses an archive that save did not write", "[sampler][errors]") {
  DistributedSampler sampler(10, of_rank(0, 3));
  torch::serialize::OutputArchive archive;
  archive.write("weight", torch::ones(1));
  std::stringstream file;
  archive.save_to(file);
  CHECK(
      error_of<c10::Error>([&] { load(sampler, file.str()); }) ==
      "DistributedSampler::load: expected an integer named \"dataset_size\", got none or something "
      "else. Pass an archive that DistributedSampler::save wrote.");
}

TEST_CASE("invalid options are refused", "[sampler][errors]") {
  const auto refused = [](const DistributedSamplerOptions& options) {
    CHECK_THROWS_AS(DistributedSampler(10, options), c10::ValueError);
    return error_of<c10::Error>([&] { DistributedSampler(10, options); });
  };
  CHECK(
      refused(of_rank(3, 3)) ==
      "DistributedSampler: Invalid rank 3, rank should be in the interval [0, 2]. Pass this "
      "process's rank among the num_replicas, or leave both unset to use the default group.");
  CHECK_THAT(refused(of_rank(-1, 3)), ContainsText("Invalid rank -1"));
  CHECK(
      refused(of_rank(0, 0)) ==
      "DistributedSampler: expected num_replicas >= 1 and below 2^31, got 0. Pass the number of "
      "ranks that share the dataset.");
  DistributedSampler sampler(10, of_rank(0, 3));
  CHECK_THAT(
      error_of<c10::Error>([&] { sampler.next(0); }),
      ContainsText("expected batch_size >= 1, got 0"));
}

TEST_CASE("unset options come from the default group", "[sampler][errors]") {
  CHECK(
      error_of<c10::Error>([] { DistributedSampler(10, DistributedSamplerOptions().rank(0)); }) ==
      "DistributedSampler: expected num_replicas in the options or a default process group, got "
      "neither. Call ddp::init_process_group() first, or set num_replicas() and rank().");
  CHECK_THAT(
      error_of<c10::Error>(
          [] { DistributedSampler(10, DistributedSamplerOptions().num_replicas(2)); }),
      ContainsText("expected rank in the options or a default process group"));

  // This thread is rank 1 of the default group; its peer only has to exist.
  auto options = ddp::ProcessGroupOptions()
                     .backend("gloo")
                     .store(c10::make_intrusive<c10d::HashStore>())
                     .world_size(2)
                     .timeout(std::chrono::seconds(20));
  auto peer = std::async(
      std::launch::async, [options]() mutable { return ddp::make_process_group(options.rank(0)); });
  ddp::init_process_group(ddp::ProcessGroupOptions(options).rank(1));
  // Through the loader that makes its own sampler from the dataset's size.
  auto loader = torch::data::make_data_loader<DistributedSampler>(Identity(10), /*options=*/3);
  const auto indices = epoch_through(*loader);
  ddp::destroy_process_group();
  peer.get();
  CHECK(indices == Indices{1, 5, 9, 8, 2});
}
