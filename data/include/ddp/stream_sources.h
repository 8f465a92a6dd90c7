#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/detail/packed_source.h>
#include <ddp/detail/stream_source.h>
#include <ddp/export.h>

namespace ddp {

/// A data set that is read from its begin to its end, for make_sharded_stream(). A value: copies
/// share the names of its files, and it opens none.
///
/// \tparam T  the type of a sample.
template <typename T>
class StreamSource {
 public:
  /// The type of a sample.
  using Sample = T;
  /// lines() and the other functions of this header call it.
  explicit StreamSource(detail::StreamSourcePtr impl) : impl_(std::move(impl)) {}
  /// For make_sharded_stream().
  const detail::StreamSourcePtr& impl() const { return impl_; }

 private:
  detail::StreamSourcePtr impl_;
};

/// The lines of text files, without their '\n'. An empty line is a sample; a file may end without a
/// '\n'. JSON lines: `ddp::transform(ddp::lines(files), parse)`.
///
/// \param files  paths; reading maps a file into memory, so it must not become shorter meanwhile.
/// \throws c10::ValueError  none, a path twice, or one that is no file that can be read. So do the
///         other functions that take files.
DDP_API StreamSource<std::string> lines(std::vector<std::string> files);

/// The samples of tar files, as WebDataset writes them: files that stand one after the other, with
/// names that are equal up to the first dot after the last slash. A sample maps the rest of each
/// name, in lower case, to the file's bytes, and "__key__" to the common part. Directories, links,
/// names without a dot and those as `__this__` are left out, as WebDataset does.
///
/// Copies a sample's bytes once, in a worker. libarchive reads the headers (GNU's, pax), and
/// compressed tar files (.tar.gz, ...), where it copies twice, and where a stream that resumes
/// reads a file from its begin.
///
/// \throws c10::Error  there is no libarchive.so.13 (Debian's package libarchive13). While reading:
///         a file that is no tar file, or is cut off; a sample with two files of one name.
DDP_API StreamSource<std::map<std::string, std::string>> tar_shards(std::vector<std::string> files);

/// A sample of tar_views().
struct TarView {
  std::string key;                          ///< "__key__" of tar_shards()
  std::map<std::string, at::Tensor> files;  ///< [n] uint8, by the rest of the name
};

/// As tar_shards(), without a copy: tensors in the mapped memory of the file, which they keep. A
/// write to one changes the tensor alone. Of a compressed file, the tensors have the one copy.
DDP_API StreamSource<TarView> tar_views(std::vector<std::string> files);

/// Sequences of `length` tokens out of files of them, uint16 with the lower byte first, as nanoGPT
/// and others write them: [length] int64. Fewer than `length` tokens at the end of a file are left
/// out. Each token is in one sequence: where targets are the inputs shifted by one, a sequence of
/// `length` has length - 1 of them.
///
/// \throws c10::ValueError  also for a length < 1, and a file with an odd number of bytes.
DDP_API StreamSource<at::Tensor> packed_tokens(std::vector<std::string> files, int64_t length);

/// Samples that a program draws.
///
/// \param make  returns a function that returns std::optional<Sample>: the next sample, or nothing
///        at the end. Called when a rank begins to read, on any thread; every call, and every rank,
///        must draw the same samples. A stream that resumes draws those before once more; if `make`
///        takes an int64_t, it begins at the sample of that number (from 0) instead.
///
/// Example:
/// ```
/// auto numbers = ddp::from_generator([] {
///   return [i = 0]() mutable { return i < 100 ? std::optional<int>(i++) : std::nullopt; };
/// });
/// ```
template <typename Make>
auto from_generator(Make make) {
  using Impl = detail::GeneratedSource<int, Make>;
  using Draw = typename std::conditional_t<
      Impl::kBeginsAnywhere, std::invoke_result<const Make&, int64_t>,
      std::invoke_result<const Make&>>::type;
  using Sample = typename std::decay_t<std::invoke_result_t<Draw&>>::value_type;
  return StreamSource<Sample>(
      std::make_shared<const detail::GeneratedSource<Sample, Make>>(std::move(make)));
}

/// Applies a function to each sample of a rank, in the stream's workers.
///
/// \param function  takes a sample of `source` and returns one of any type. Called from several
///        threads at a time, so it is `const` there; it should return the same for the same sample.
template <typename In, typename Function>
auto transform(const StreamSource<In>& source, Function function) {
  using Out = std::decay_t<std::invoke_result_t<const Function&, In>>;
  return StreamSource<Out>(std::make_shared<const detail::TransformedSource<In, Out, Function>>(
      source.impl(), std::move(function)));
}

/// Sequences of `length` tokens out of documents of any length, one after the other, across the
/// ends of files: [length] int64. Fewer than `length` tokens at the end of an epoch are left out.
///
/// Where a sequence begins depends on the documents before it. So each rank makes all documents,
/// one after the other and on one thread, also those of other ranks: for slow tokenizers, set
/// by_shard(true), with which a rank makes the documents of its own files, or write files for
/// packed_tokens().
///
/// \param source  of std::vector of a type of integers, as a transform() makes them.
/// \param end  a token after each document. Default: none
/// \throws c10::ValueError  length < 1.
template <typename Token>
StreamSource<at::Tensor> packed(
    const StreamSource<std::vector<Token>>& source, int64_t length,
    std::optional<int64_t> end = std::nullopt) {
  static_assert(std::is_integral_v<Token>, "packed: expected documents of a type of integers");
  const auto to_int64 = [](const void* sample) {
    const auto& document = *static_cast<const std::vector<Token>*>(sample);
    return std::vector<int64_t>(document.begin(), document.end());
  };
  return StreamSource<at::Tensor>(detail::packed_source(source.impl(), to_int64, length, end));
}

}  // namespace ddp
