#include <ATen/ATen.h>

#include "comm/backends/shm/memory/arena.h"
#include "comm/backends/shm/memory/segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "support/catch.h"

using ddp::backends::shm::Arena;
using ddp::backends::shm::Segment;

namespace {

constexpr size_t kPage = 4096;
constexpr auto kDiscard = Arena::OnRelease::kDiscard;
constexpr auto kKeep = Arena::OnRelease::kKeep;

}  // namespace

TEST_CASE("all mappings of a segment share its memory", "[shm][pure]") {
  const auto made = Segment::make(3 * kPage);
  const auto opened = Segment::open(::getpid(), made->fd(), 3 * kPage);
  CHECK(opened->data() != made->data());
  CHECK(made->data()[5000] == std::byte{0});
  made->data()[5000] = std::byte{7};
  CHECK(opened->data()[5000] == std::byte{7});
  made->discard(kPage, kPage);
  CHECK(opened->data()[5000] == std::byte{0});
  CHECK(opened->fd() == -1);
}

TEST_CASE("a segment that does not exist is an error with the reason", "[shm][errors]") {
  CHECK_THROWS_WITH(
      Segment::open(::getpid(), 987, kPage),
      ContainsText("/fd/987") && ContainsText("No such file"));
}

TEST_CASE("a file that is not a segment of that size is not mapped", "[shm][errors]") {
  const auto opens = [](int fd) { return Segment::open(::getpid(), fd, kPage); };
  const auto made = Segment::make(2 * kPage);
  CHECK_THROWS_WITH(opens(made->fd()), ContainsText("but it has 8192 bytes, not 4096"));

  const int unsealed = ::memfd_create("other", MFD_CLOEXEC);
  REQUIRE(::ftruncate(unsealed, kPage) == 0);
  CHECK_THROWS_WITH(opens(unsealed), ContainsText("but it is no memfd of a sealed size"));
  ::close(unsealed);

  std::FILE* const file = std::tmpfile();
  REQUIRE(::ftruncate(::fileno(file), kPage) == 0);
  CHECK_THROWS_WITH(opens(::fileno(file)), ContainsText("but it is no memfd of a sealed size"));
  std::fclose(file);

  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  CHECK_THROWS_WITH(opens(pipe[0]), ContainsText("but it is no memfd of a sealed size"));
  for (const int end : pipe) ::close(end);
}

TEST_CASE("the size of a segment cannot be changed", "[shm][pure]") {
  const auto made = Segment::make(2 * kPage);
  CHECK(::ftruncate(made->fd(), kPage) == -1);
  CHECK(errno == EPERM);
  CHECK(::ftruncate(made->fd(), 3 * kPage) == -1);
}

TEST_CASE("a segment of another user is not mapped", "[shm][errors]") {
  if (::geteuid() != 0) return;  // only root can give a file away
  const auto made = Segment::make(kPage);
  REQUIRE(::fchown(made->fd(), 65534, 65534) == 0);
  CHECK_THROWS_WITH(
      Segment::open(::getpid(), made->fd(), kPage),
      ContainsText("it is user 65534's, not user 0's"));
}

TEST_CASE("an arena allocates blocks that do not overlap, and reuses them", "[shm][pure]") {
  const auto arena = std::make_shared<Arena>(Segment::make(9 * kPage), 8 * kPage);
  auto a = arena->allocate(1, at::kFloat, kKeep);
  auto b = arena->allocate(kPage, at::kByte, kKeep);
  auto c = arena->allocate(kPage + 1, at::kByte, kKeep);
  CHECK(arena->offset_of(a) == 0u);
  CHECK(arena->offset_of(b) == kPage);
  CHECK(arena->offset_of(c) == 2 * kPage);
  CHECK(arena->offset_of(c.narrow(0, 10, 5)) == 2 * kPage + 10);
  CHECK_FALSE(arena->offset_of(at::zeros(3)).has_value());

  b = at::Tensor();
  auto d = arena->allocate(2 * kPage, at::kByte, kKeep);
  CHECK(arena->offset_of(d) == 4 * kPage);  // too large for b's block
  a = at::Tensor();
  auto e = arena->allocate(2 * kPage, at::kByte, kKeep);
  CHECK(arena->offset_of(e) == 0u);  // a's and b's blocks, merged
  c = d = e = at::Tensor();
  CHECK(arena->offset_of(arena->allocate(8 * kPage, at::kByte, kKeep)) == 0u);
}

TEST_CASE("allocating from a full arena throws", "[shm][errors]") {
  const auto arena = std::make_shared<Arena>(Segment::make(2 * kPage), 2 * kPage);
  const auto all = arena->allocate(2 * kPage, at::kByte, kKeep);
  CHECK_THROWS_AS(arena->allocate(1, at::kByte, kKeep), c10::OutOfMemoryError);
}

TEST_CASE("discarded memory goes back to the kernel", "[shm][pure]") {
  const auto arena = std::make_shared<Arena>(Segment::make(9 * kPage), 8 * kPage);
  arena->allocate(10, at::kByte, kKeep).fill_(3);
  CHECK(arena->allocate(10, at::kByte, kKeep)[0].item<int>() == 3);
  arena->allocate(10, at::kByte, kDiscard).fill_(4);
  CHECK(arena->allocate(10, at::kByte, kKeep)[0].item<int>() == 0);
}

TEST_CASE("a frozen arena does not reuse memory", "[shm][pure]") {
  const auto arena = std::make_shared<Arena>(Segment::make(8 * kPage), 8 * kPage);
  auto a = arena->allocate(10, at::kByte, kDiscard).fill_(5);
  const auto* address = a.const_data_ptr<uint8_t>();
  arena->freeze();
  a = at::Tensor();
  CHECK(*address == 5);
  CHECK(arena->offset_of(arena->allocate(10, at::kByte, kDiscard)) == kPage);
}

TEST_CASE("a tensor outlives its arena's owner", "[shm][pure]") {
  auto arena = std::make_shared<Arena>(Segment::make(9 * kPage), 8 * kPage);
  auto t = arena->allocate(100, at::kFloat, kDiscard).fill_(2);
  arena.reset();
  CHECK(t.sum().item<float>() == 200);
}
