// The formats that streams read.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/pad_collate.h>

#include "streams.h"
#include "support/error_of.h"
#include "tar_files.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::make_sharded_stream;
using Files = std::map<std::string, std::string>;

std::vector<int64_t> numbers_of(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::string text_in(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

TEST_CASE("packed_tokens cuts files into sequences, and leaves a shorter end out") {
  const TemporaryFolder folder;
  const auto files = token_files(folder, {5, 1, 4});
  const auto all = all_of(ddp::packed_tokens(files, 2));
  REQUIRE(all.size() == 4);
  CHECK(all[0].scalar_type() == at::kLong);
  CHECK(numbers_of(all[1]) == std::vector<int64_t>{542, 813});
  CHECK(numbers_of(all[2]) == std::vector<int64_t>{6 * 271, 7 * 271});
  const auto largest = folder.write("largest", "\xff\xff\x01\x80");
  CHECK(
      numbers_of(all_of(ddp::packed_tokens({largest}, 2))[0]) ==
      std::vector<int64_t>{65535, 32769});
  CHECK(all_of(ddp::packed_tokens(files, 6)).empty());
}

TEST_CASE("packed_tokens refuses odd bytes and no length") {
  const TemporaryFolder folder;
  const auto file = folder.write("odd", "abc");
  CHECK_THAT(
      error_of<c10::ValueError>([&] { ddp::packed_tokens({file}, 1); }),
      ContainsText("expected tokens of 2 bytes, got 3 bytes in \"" + file));
  CHECK_THAT(
      error_of<c10::ValueError>([&] { ddp::packed_tokens({folder.write("even", "ab")}, 0); }),
      ContainsText("expected a length >= 1, got 0"));
}

TEST_CASE("packed makes sequences of documents, across their ends and those of files") {
  const TemporaryFolder folder;
  const auto documents = ddp::transform(
      ddp::lines({folder.write("a", "ab\n\nc\n"), folder.write("b", "defgh\n")}),
      [](const std::string& line) { return std::vector<int32_t>(line.begin(), line.end()); });
  const auto all = all_of(ddp::packed(documents, 3));
  REQUIRE(all.size() == 2);
  CHECK(numbers_of(all[0]) == std::vector<int64_t>{'a', 'b', 'c'});
  CHECK(numbers_of(all[1]) == std::vector<int64_t>{'d', 'e', 'f'});
  const auto ended = all_of(ddp::packed(documents, 4, 0));
  REQUIRE(ended.size() == 3);
  CHECK(numbers_of(ended[0]) == std::vector<int64_t>{'a', 'b', 0, 0});
  CHECK(numbers_of(ended[1]) == std::vector<int64_t>{'c', 0, 'd', 'e'});
  CHECK(numbers_of(ended[2]) == std::vector<int64_t>{'f', 'g', 'h', 0});
  CHECK_THAT(
      error_of<c10::ValueError>([&] { ddp::packed(documents, 0); }),
      ContainsText("packed: expected"));
}

TEST_CASE("packed names the document that could not be made") {
  const TemporaryFolder folder;
  const auto file = folder.write("a", "ab\nc\n");
  const auto documents = ddp::transform(ddp::lines({file}), [](const std::string& line) {
    return std::vector<int>{std::stoi(line)};
  });
  auto stream = make_sharded_stream(ddp::packed(documents, 3));
  CHECK_THAT(
      error_of<c10::Error>([&] { stream.next(); }),
      ContainsText("the document of packed() in \"" + file + "\" at byte 0, got an error: stoi"));
}

TEST_CASE("tar_shards gives samples as WebDataset does") {
  const TemporaryFolder folder;
  folder.write("__meta.x__", "left out");
  folder.write("a.JPG", std::string("\0\xff picture", 10));
  folder.write("a.seg.png", "mask");
  folder.write("b.jpg", "");
  folder.write("README", "left out");
  REQUIRE(
      std::system(("mkdir -p " + folder.file("dir.d") + " && ln -s b.jpg " + folder.file("b.lnk"))
                      .c_str()) == 0);
  const auto long_name = std::string(180, 'n');
  folder.write("dir.d/" + long_name + ".txt", std::string(5000, 't'));
  folder.write("dir.d/a.jpg", "other");
  const auto format = GENERATE("ustar", "gnu", "pax");
  CAPTURE(format);
  const bool has_long_name = std::string(format) != "ustar";
  run_tar(
      folder.path(), std::string("cf x.tar --format=") + format +
                         " __meta.x__ a.JPG a.seg.png README b.lnk b.jpg dir.d/a.jpg" +
                         (has_long_name ? " dir.d/" + long_name + ".txt" : ""));
  const auto all = all_of(ddp::tar_shards({folder.file("x.tar")}));
  REQUIRE(all.size() == (has_long_name ? 4 : 3));
  CHECK(
      all[0] ==
      Files{{"__key__", "a"}, {"jpg", std::string("\0\xff picture", 10)}, {"seg.png", "mask"}});
  CHECK(all[1] == Files{{"__key__", "b"}, {"jpg", ""}});
  CHECK(all_of(ddp::tar_views({folder.file("x.tar")}))[1].files.at("jpg").numel() == 0);
  CHECK(all[2] == Files{{"__key__", "dir.d/a"}, {"jpg", "other"}});
  if (has_long_name) {
    CHECK(all[3] == Files{{"__key__", "dir.d/" + long_name}, {"txt", std::string(5000, 't')}});
  }
}

TEST_CASE("tar_views gives the bytes where they are mapped, also when the stream is gone") {
  const TemporaryFolder folder;
  const auto files = tar_files(folder, {3}, GENERATE("", "z"));
  const auto copies = all_of(ddp::tar_shards(files));
  const auto before = read_bytes(files[0]);
  auto views = all_of(ddp::tar_views(files));
  REQUIRE(views.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(views[i].key == copies[i].at("__key__"));
    CHECK(views[i].files.size() == 2);
    CHECK(text_in(views[i].files.at("txt")) == copies[i].at("txt"));
  }
  views[2].files.at("txt").fill_('y');
  CHECK(text_in(views[2].files.at("txt")) == std::string(62, 'y'));
  CHECK(read_bytes(files[0]) == before);
}

#ifdef MADV_POPULATE_READ
namespace {

/// The share of the pages of a tensor that this process has in memory.
double share_in_memory(const at::Tensor& bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) / page;
  std::vector<uint64_t> entries(bytes.nbytes() / page);
  std::ifstream pages("/proc/self/pagemap", std::ios::binary);
  pages.seekg(static_cast<std::streamoff>(begin * sizeof(uint64_t)));
  pages.read(
      reinterpret_cast<char*>(entries.data()),
      static_cast<std::streamsize>(entries.size() * sizeof(uint64_t)));
  const auto present =
      std::count_if(entries.begin(), entries.end(), [](auto entry) { return entry >> 63 != 0; });
  return static_cast<double>(present) / static_cast<double>(entries.size());
}

bool kernel_populates() {
  char here = 0;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  auto* begin = &here - reinterpret_cast<uintptr_t>(&here) % page;
  return ::madvise(begin, page, MADV_POPULATE_READ) == 0;  // since Linux 5.14
}

}  // namespace

TEST_CASE("what loads a view reads its pages") {
  if (!kernel_populates()) return;
  const TemporaryFolder folder;
  folder.write("a.bin", std::string(4 << 20, 'a'));
  folder.write("b.bin", std::string(4 << 20, 'b'));
  run_tar(folder.path(), "cf x.tar a.bin b.bin");
  const auto workers = GENERATE(0, 1);
  auto stream = make_sharded_stream(
      ddp::tar_views({folder.file("x.tar")}), ddp::ShardedStreamOptions().workers(workers));
  while (const auto sample = stream.next()) CHECK(share_in_memory(sample->files.at("bin")) > 0.9);
}
#endif

TEST_CASE("a file with holes is whole") {
  const TemporaryFolder folder;
  REQUIRE(
      std::system(("cd " + folder.path() +
                   " && truncate -s 100000 h.bin && printf end >> h.bin && truncate -s 200000 "
                   "h.bin && truncate -s 5000 i.bin")
                      .c_str()) == 0);
  run_tar(folder.path(), "cSf x.tar h.bin i.bin");
  const auto all = all_of(ddp::tar_shards({folder.file("x.tar")}));
  REQUIRE(all.size() == 2);
  CHECK(all[0].at("bin") == read_bytes(folder.file("h.bin")));
  CHECK(all[1].at("bin") == std::string(5000, '\0'));
}

TEST_CASE("tar files that are cut off or none are errors after the samples before") {
  const TemporaryFolder folder;
  const auto files = tar_files(folder, {40});
  const auto whole = read_bytes(files[0]);
  auto cut =
      make_sharded_stream(ddp::tar_shards({folder.write("cut.tar", whole.substr(0, 33'000))}));
  size_t samples = 0;
  const auto error = error_of<c10::Error>([&] {
    while (cut.next()) ++samples;
  });
  CHECK(samples > 5);
  CHECK_THAT(
      error,
      ContainsText("expected a whole tar file \"" + folder.file("cut.tar") + "\", got: Truncated"));
  auto none =
      make_sharded_stream(ddp::tar_shards({folder.write("none.tar", "these are no headers")}));
  CHECK_THAT(error_of<c10::Error>([&] { none.next(); }), ContainsText("expected a whole tar file"));
}

TEST_CASE("a sample with two files of one name is an error") {
  const TemporaryFolder folder;
  folder.write("a.txt", "1");
  folder.write("a.TXT", "2");
  run_tar(folder.path(), "cf x.tar a.txt a.TXT");
  auto stream = make_sharded_stream(ddp::tar_shards({folder.file("x.tar")}));
  CHECK_THAT(error_of<c10::Error>([&] { stream.next(); }), ContainsText("got two \"a.txt\""));
}

TEST_CASE("samples of uneven length make a padded batch") {
  const TemporaryFolder folder;
  const auto source =
      ddp::transform(ddp::lines({folder.write("a", "abc\nd\n")}), [](const std::string& line) {
        return torch::data::Example<>(
            at::full({static_cast<int64_t>(line.size())}, 1.0), at::scalar_tensor(line[0]));
      });
  auto batches = ddp::batched(
      make_sharded_stream(source), 2,
      [](const std::vector<torch::data::Example<>>& samples) { return ddp::pad_collate(samples); });
  const auto batch = batches.next();
  REQUIRE(batch);
  CHECK(numbers_of(batch->lengths) == std::vector<int64_t>{3, 1});
  CHECK(batch->data.sum().item<double>() == 4);
}

}  // namespace
