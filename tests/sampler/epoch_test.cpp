// How a sampler changes epochs, and which samples count for its position.
#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/length_grouped_sampler.h>
#include <ddp/sampler.h>
#include <ddp/weighted_sampler.h>

#include "drawing.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace {

using ddp::DistributedSampler;
using ddp::DistributedSamplerOptions;
using ddp::testing::Warnings;

DistributedSamplerOptions first_of_two() {
  return DistributedSamplerOptions().rank(0).num_replicas(2);
}

}  // namespace

TEST_CASE("a second epoch in the same order warns once", "[sampler][errors]") {
  Warnings warnings;
  DistributedSampler sampler(10, first_of_two());
  const auto first = epoch_of(sampler);
  CHECK(warnings.texts.empty());
  CHECK(epoch_of(sampler) == first);
  REQUIRE(warnings.texts.size() == 1);
  CHECK(
      warnings.texts[0] ==
      "DistributedSampler: rank 0 begins an epoch in the same order as the one before (epoch 0), "
      "because nobody called set_epoch() in between. Call set_epoch(epoch) before each epoch, on "
      "every rank, or set the option advance_epoch.");
  epoch_of(sampler);
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("offset is where the last reset began", "[sampler][pure]") {
  DistributedSampler sampler(10, first_of_two());
  sampler.reset();
  sampler.next(2);
  CHECK(sampler.offset() == 0);
  DistributedSampler resumed(10, first_of_two());
  load(resumed, saved(sampler));
  CHECK(resumed.offset() == 4);
  CHECK(epoch_of(resumed).size() == 3);
  CHECK(resumed.offset() == 4);
  resumed.set_epoch(1);
  resumed.reset();
  CHECK(resumed.offset() == 0);
}

TEST_CASE("no warning where the order was chosen or cannot differ", "[sampler][pure]") {
  Warnings warnings;
  DistributedSampler called(10, first_of_two());
  for (const size_t epoch : {0, 1, 1, 7}) {
    called.set_epoch(epoch);
    epoch_of(called);
  }
  DistributedSampler in_order(10, first_of_two().shuffle(false));
  DistributedSampler tiny(1, first_of_two());
  DistributedSampler advancing(10, first_of_two().advance_epoch(true));
  ddp::DistributedEvalSampler evaluation(
      10, ddp::DistributedEvalSamplerOptions().rank(0).num_replicas(2));
  for (ddp::ShardedSampler* sampler :
       {static_cast<ddp::ShardedSampler*>(&in_order), static_cast<ddp::ShardedSampler*>(&tiny),
        static_cast<ddp::ShardedSampler*>(&advancing),
        static_cast<ddp::ShardedSampler*>(&evaluation)}) {
    epoch_of(*sampler);
    epoch_of(*sampler);
  }
  called.set_epoch(8);
  called.reset();
  called.reset();  // nothing was drawn in between: still the same epoch
  CHECK(warnings.texts.empty());
}

TEST_CASE("with advance_epoch, each epoch follows the previous one", "[sampler][pure]") {
  DistributedSampler sampler(10, first_of_two().advance_epoch(true));
  DistributedSampler expected(10, first_of_two());
  for (size_t epoch = 0; epoch < 4; ++epoch) {
    expected.set_epoch(epoch);
    CHECK(epoch_of(sampler) == epoch_of(expected));
    CHECK(sampler.epoch() == epoch);
  }
  SECTION("from the epoch that was set") {
    sampler.set_epoch(9);
    epoch_of(sampler);
    epoch_of(sampler);
    CHECK(sampler.epoch() == 10);
  }
  SECTION("after an epoch that was left early") {
    sampler.reset();
    sampler.next(1);
    CHECK(sampler.epoch() == 4);
    sampler.reset();
    CHECK(sampler.epoch() == 5);
  }
  SECTION("on a rank whose share is empty, as on the others") {
    for (const int64_t rank : {0, 2}) {
      DistributedSampler dropping(
          2, DistributedSamplerOptions().rank(rank).num_replicas(3).drop_last(true).advance_epoch(
                 true));
      epoch_of(dropping);
      epoch_of(dropping);
      CHECK(dropping.epoch() == 1);
    }
  }
  SECTION("also when the dataset grows") {
    sampler.reset(12);
    CHECK(sampler.epoch() == 4);
    CHECK(rest(sampler).size() == 6);
    sampler.reset(14);
    CHECK(sampler.epoch() == 5);
    CHECK(rest(sampler).size() == 7);
  }
  SECTION("with the other samplers, too") {
    ddp::DistributedEvalSampler evaluation(
        10, ddp::DistributedEvalSamplerOptions().rank(0).num_replicas(2).advance_epoch(true));
    ddp::DistributedWeightedSampler weighted(
        std::vector<double>(10, 1),
        ddp::DistributedWeightedSamplerOptions().rank(0).num_replicas(2).advance_epoch(true));
    ddp::DistributedLengthGroupedSampler grouped(
        std::vector<int64_t>(10, 1),
        ddp::DistributedLengthGroupedSamplerOptions(3).rank(0).num_replicas(2).advance_epoch(true));
    for (auto* each : std::vector<ddp::ShardedSampler*>{&evaluation, &weighted, &grouped}) {
      epoch_of(*each);
      epoch_of(*each);
      CHECK(each->epoch() == 1);
    }
  }
  SECTION("and the rest of a loaded epoch counts as that epoch") {
    sampler.reset();
    sampler.next(2);
    DistributedSampler resumed(10, first_of_two().advance_epoch(true));
    load(resumed, saved(sampler));
    CHECK(epoch_of(resumed) == rest(sampler));
    CHECK(resumed.epoch() == 4);
    CHECK(epoch_of(resumed) == epoch_of(sampler));
    CHECK(resumed.epoch() == 5);
  }
}

TEST_CASE("the position counts the consumed samples, once consume was called", "[sampler][pure]") {
  DistributedSampler sampler(20, first_of_two());
  const auto whole = epoch_of(sampler);
  sampler.set_epoch(0);
  sampler.reset();
  sampler.next(4);
  sampler.next(4);  // as a loader that draws one batch ahead

  const auto remaining = [&] {
    DistributedSampler resumed(20, first_of_two());
    load(resumed, saved(sampler));
    return epoch_of(resumed);
  };
  const auto from = [&](int64_t position) {
    return Indices(whole.begin() + position, whole.end());
  };
  CHECK(remaining() == from(8));
  sampler.consume(0);
  CHECK(remaining() == whole);
  sampler.consume(4);
  CHECK(remaining() == from(4));
  sampler.consume(4);
  CHECK(remaining() == from(8));

  SECTION("in a resumed run, too, before it consumes anything") {
    DistributedSampler resumed(20, first_of_two());
    load(resumed, saved(sampler));
    resumed.reset();
    resumed.next(1);  // drawn ahead
    DistributedSampler again(20, first_of_two());
    load(again, saved(resumed));
    CHECK(epoch_of(again) == from(8));
  }
  SECTION("in the next epoch, too") {
    sampler.set_epoch(1);
    sampler.reset();
    sampler.next(4);
    DistributedSampler resumed(20, first_of_two());
    load(resumed, saved(sampler));
    CHECK(epoch_of(resumed).size() == 10);
    CHECK(resumed.epoch() == 1);
  }
  SECTION("and never more than next returned") {
    CHECK(
        error_of<c10::Error>([&] { sampler.consume(1); }) ==
        "DistributedSampler::consume: expected at most the 0 samples that rank 0 was handed out in "
        "this epoch and has not consumed, got 1. Count each sample once, before the next epoch "
        "begins.");
    CHECK(remaining() == from(8));
  }
}

TEST_CASE("a damaged position is refused", "[sampler][errors]") {
  const auto archive_with = [](const char* damaged, int64_t value) {
    torch::serialize::OutputArchive archive;
    for (const auto& [key, sound] : std::vector<std::pair<std::string, int64_t>>{
             {"epoch", 0},
             {"position", 4},
             {"step_size", 2},
             {"counts_consumed", 0},
             {"dataset_size", 20},
             {"num_samples", 20},
             {"shuffle", 1},
             {"seed", 0},
             {"drop_last", 0},
             {"fingerprint", 0}}) {
      archive.write(key, key == damaged ? value : sound);
    }
    std::stringstream file;
    archive.save_to(file);
    return file.str();
  };
  DistributedSampler sampler(20, first_of_two());
  CHECK(error_of<c10::Error>([&] { load(sampler, archive_with("none", 0)); }).empty());
  CHECK(epoch_of(sampler).size() == 8);
  for (const auto& [key, value] : std::vector<std::pair<const char*, int64_t>>{
           {"epoch", -1}, {"position", -2}, {"position", 21}, {"step_size", 0}}) {
    CAPTURE(key, value);
    CHECK_THAT(
        error_of<c10::Error>(
            [&, key = key, value = value] { load(sampler, archive_with(key, value)); }),
        ContainsText("The archive is damaged"));
  }
}

TEST_CASE("a thread may draw ahead while another one consumes and saves", "[sampler][pure]") {
  DistributedSampler sampler(20000, first_of_two());
  sampler.reset();
  sampler.consume(0);
  std::atomic<size_t> drawn{0};
  std::thread loader([&] {
    while (const auto batch = sampler.next(1)) drawn += batch->size();
  });
  size_t consumed = 0;
  while (consumed < 10000) {
    const size_t ready = drawn - consumed;
    sampler.consume(ready);
    consumed += ready;
    if (consumed % 16 == 0) saved(sampler);
  }
  loader.join();
  DistributedSampler resumed(20000, first_of_two());
  load(resumed, saved(sampler));
  CHECK(epoch_of(resumed).empty());
}

TEST_CASE("consume before the first epoch is refused", "[sampler][errors]") {
  DistributedSampler sampler(20, first_of_two());
  sampler.consume(0);
  CHECK_THROWS_AS(sampler.consume(1), c10::ValueError);
}
