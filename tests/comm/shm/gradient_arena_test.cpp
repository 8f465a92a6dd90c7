#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "comm/backends/shm/memory/gradient_arena.h"
#include "comm/backends/shm/memory/segment.h"

#include "support/catch.h"

using ddp::backends::shm::Arena;
using ddp::backends::shm::GradientArena;
using ddp::backends::shm::Segment;

namespace {

constexpr size_t kPageBytes = 4096;
constexpr int64_t kNumel = 25000;
constexpr size_t kBytes = kNumel * sizeof(float);

std::shared_ptr<GradientArena> make_arena(size_t pages = 1024) {
  return std::make_shared<GradientArena>(
      std::make_shared<Arena>(Segment::make(pages * kPageBytes), pages * kPageBytes),
      /*least_bytes=*/1, [](at::ScalarType) { return true; });
}

}  // namespace

TEST_CASE(
    "a gradient arena serves the given sizes, on the calling thread, while the service exists",
    "[shm][pure]") {
  const auto arena = make_arena();
  CHECK_FALSE(arena->contains(at::empty({kNumel})));
  auto service = arena->serve({kBytes, 2 * kBytes});
  const auto served = at::ones({kNumel});
  CHECK(arena->contains(served));
  CHECK(arena->contains(at::ones({50, kNumel / 25})));
  CHECK_FALSE(arena->contains(at::empty({kNumel + 1})));
  CHECK_FALSE(arena->contains(at::empty({3})));
  bool elsewhere = true;
  std::thread([&] { elsewhere = arena->contains(at::empty({kNumel})); }).join();
  CHECK_FALSE(elsewhere);
  std::thread([&] { service.reset(); }).join();
  CHECK_FALSE(arena->contains(at::empty({kNumel})));
  CHECK(at::equal(served, at::ones({kNumel})));
}

TEST_CASE("the latest of two gradient arenas serves", "[shm][pure]") {
  const auto first = make_arena(), second = make_arena();
  const auto service = first->serve({kBytes});
  {
    const auto other = second->serve({kBytes});
    CHECK(second->contains(at::empty({kNumel})));
  }
  CHECK(first->contains(at::empty({kNumel})));
}

TEST_CASE("memory of a gradient arena is reused, and adjacent blocks are merged", "[shm][pure]") {
  const auto arena = make_arena(/*pages=*/4 * ((kBytes + kPageBytes - 1) / kPageBytes));
  const auto service = arena->serve({kBytes, 4 * kBytes});
  std::vector<at::Tensor> four;
  for (int i = 0; i < 4; ++i) {
    four.push_back(at::full({kNumel}, float(i)));
    CHECK(arena->contains(four.back()));
  }
  const auto heap = at::full({kNumel}, 9.0F);
  CHECK_FALSE(arena->contains(heap));  // it is full
  const void* freed = four[1].const_data_ptr();
  four.erase(four.begin() + 1);
  CHECK(at::empty({kNumel}).const_data_ptr() == freed);
  CHECK(four[1][0].item<float>() == 2);
  four.clear();
  CHECK(arena->contains(at::empty({4 * kNumel})));
}

TEST_CASE("a full gradient arena allocates on the heap", "[shm][pure]") {
  const auto arena = make_arena(/*pages=*/1);
  const auto tensor = arena->allocate(kNumel, at::kFloat);
  CHECK_FALSE(arena->contains(tensor));
  CHECK(tensor.sizes() == at::IntArrayRef{kNumel});
}

TEST_CASE("a tensor of a gradient arena behaves like any other", "[shm][pure]") {
  auto arena = make_arena();
  auto tensor = arena->allocate(kNumel, at::TensorOptions(at::kDouble));
  CHECK(arena->contains(tensor));
  CHECK(tensor.scalar_type() == at::kDouble);
  CHECK(tensor.storage().use_count() == 1);
  tensor.fill_(3);
  arena.reset();  // the tensor keeps its memory
  CHECK(tensor.sum().item<double>() == 3.0 * kNumel);
  tensor.resize_({4 * kNumel});
  CHECK(tensor.narrow(0, 0, kNumel).sum().item<double>() == 3.0 * kNumel);
}

TEST_CASE("the writes of a forked process do not reach its parent", "[shm][pure]") {
  const auto arena = make_arena();
  const auto service = arena->serve({kBytes});
  auto tensor = at::ones({kNumel});
  REQUIRE(arena->contains(tensor));
  const pid_t child = fork();
  if (child == 0) {
    const bool seen = at::equal(tensor, at::ones({kNumel}));
    tensor.fill_(2);
    const bool heap = !arena->contains(at::empty({kNumel}));  // the arena does not serve here
    const bool written = at::equal(tensor, at::full({kNumel}, 2.0F));
    tensor.reset();
    _exit(seen && heap && written ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(at::equal(tensor, at::ones({kNumel})));
  const auto next = at::full({kNumel}, 3.0F);
  CHECK(at::equal(tensor, at::ones({kNumel})));
}

TEST_CASE("a gradient arena returns its memory to the kernel when it is destroyed", "[shm][pure]") {
  const auto segment = Segment::make(1024 * kPageBytes);
  auto arena = std::make_shared<GradientArena>(
      std::make_shared<Arena>(segment, segment->bytes()), 1, [](at::ScalarType) { return true; });
  auto kept = arena->allocate(kNumel, at::kFloat).fill_(1);
  (void)arena->allocate(kNumel, at::kFloat).fill_(1);
  const auto pages = [&] {
    struct stat file {};
    REQUIRE(fstat(segment->fd(), &file) == 0);
    return static_cast<size_t>(file.st_blocks) * 512 / kPageBytes;
  };
  const size_t both = pages();
  arena.reset();
  CHECK(pages() <= both / 2 + 1);
  CHECK(at::equal(kept, at::ones({kNumel})));
}

TEST_CASE("the allocator of gradient arenas serves raw requests", "[shm][pure]") {
  const auto arena = make_arena();
  const auto service = arena->serve({kBytes});
  auto* allocator = c10::GetCPUAllocator();
  for (const size_t bytes : {kBytes, kBytes + 1, size_t{0}}) {
    void* block = allocator->raw_allocate(bytes);
    if (bytes > 0) std::memset(block, 1, bytes);
    allocator->raw_deallocate(block);
  }
  auto copy = allocator->clone(at::ones({3}).const_data_ptr(), 12);
  CHECK(static_cast<const float*>(copy.get())[2] == 1);
}
