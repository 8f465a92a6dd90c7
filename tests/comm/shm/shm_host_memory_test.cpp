// The memory that all groups of a job share on one host.
#include <unistd.h>

#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "comm/backends/shm/backend/host_memory.h"

#include "support/catch.h"

namespace ddp::host_memory_test {
namespace {

using backends::shm::ControlBlock;
using backends::shm::HostMemory;

constexpr size_t kArena = size_t{1} << 20;

/// Two ranks of one host, in one process.
struct TwoRanks {
  TwoRanks() {
    leader->map({leader->location(), other->location()});
    other->map({leader->location(), other->location()});
  }

  std::shared_ptr<HostMemory> leader = make(0);
  std::shared_ptr<HostMemory> other = make(1);

 private:
  static std::shared_ptr<HostMemory> make(int rank) {
    return std::make_shared<HostMemory>(std::vector<std::string>{"h", "h"}, rank, kArena);
  }
};

}  // namespace

TEST_CASE("the ranks of a host map a part of a process's addresses", "[shm][pure]") {
  using backends::shm::mappable_bytes;
  CHECK(mappable_bytes(0x7ffd12345678) == size_t{1} << 42);  // x86-64
  CHECK(mappable_bytes(0x7fd1234567) == size_t{1} << 34);    // aarch64 with 39 bits
  CHECK(mappable_bytes(0xffffd1234567) == size_t{1} << 43);  // aarch64 with 48 bits
}

TEST_CASE("the ranks of a group open one control block", "[shm][pure]") {
  TwoRanks ranks;
  const auto offset = ranks.leader->reserve_control(2);
  const auto own = ranks.leader->open_control(0, offset, 2);
  const auto its = ranks.other->open_control(0, offset, 2);
  REQUIRE((own && its));
  CHECK(own != its);
  own->of(1).announced = 7;
  CHECK(its->of(1).announced == 7);
  CHECK(its->users == 2);
}

TEST_CASE("a control block is used again after its last user, and begins anew", "[shm][pure]") {
  const bool leader_is_last = GENERATE(false, true);
  CAPTURE(leader_is_last);
  TwoRanks ranks;
  const auto offset = ranks.leader->reserve_control(2);
  auto own = ranks.leader->open_control(0, offset, 2);
  auto its = ranks.other->open_control(0, offset, 2);
  its->of(1).announced = 7;
  (leader_is_last ? its : own).reset();
  CHECK(ranks.leader->reserve_control(2) != offset);
  (leader_is_last ? own : its).reset();
  CHECK(ranks.leader->reserve_control(2) == offset);
  const auto again = ranks.leader->open_control(0, offset, 2);
  CHECK(again->of(1).announced == 0);
  CHECK(again->users == 2);
}

TEST_CASE("a control block that a rank has not opened stays reserved", "[shm][pure]") {
  TwoRanks ranks;
  const auto offset = ranks.leader->reserve_control(2);
  ranks.leader->open_control(0, offset, 2).reset();
  CHECK(ranks.leader->reserve_control(2) != offset);
}

TEST_CASE("a control block keeps the memory of its leader mapped", "[shm][pure]") {
  auto ranks = std::make_unique<TwoRanks>();
  const auto its = ranks->other->open_control(0, ranks->leader->reserve_control(2), 2);
  ranks.reset();
  its->of(0).announced = 3;
  CHECK(its->of(0).announced == 3);
}

TEST_CASE("no control block is opened where none can be", "[shm][errors]") {
  TwoRanks ranks;
  for (const size_t offset : {kArena, ~size_t{0}, ~size_t{0} - 4095, size_t{64}}) {
    CAPTURE(offset);
    CHECK(ranks.other->open_control(0, offset, 2) == nullptr);
  }
}

TEST_CASE("a full arena has no room for a control block", "[shm][errors]") {
  TwoRanks ranks;
  const auto all =
      ranks.leader->arena()->allocate(kArena, at::kByte, backends::shm::Arena::OnRelease::kKeep);
  CHECK_THROWS_WITH(
      ranks.leader->reserve_control(2),
      ContainsText("bytes for the state of a group, but the 1048576 of rank 0 are in use"));
}

TEST_CASE("memory that is kept goes to no other tensor", "[shm][pure]") {
  TwoRanks ranks;
  const auto arena = ranks.leader->arena();
  const auto allocate = [&] {
    return arena->allocate(10, at::kByte, backends::shm::Arena::OnRelease::kKeep);
  };
  auto kept = std::make_shared<at::Tensor>(allocate());
  const std::weak_ptr<at::Tensor> seen = kept;
  const auto offset = arena->offset_of(*kept);
  arena->keep(std::move(kept));
  CHECK(arena->offset_of(allocate()) != offset);
  // After the last group, too: ranks that are slower may still write to it.
  ranks.leader.reset();
  CHECK(seen.expired());
  CHECK(arena->offset_of(allocate()) != offset);
}

}  // namespace ddp::host_memory_test
