// Batches that come of a ShardedStream: its sources, a rank's rows of it, and those that one
// process knows of.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <ddp/batch_stream.h>
#include <ddp/sharded_stream.h>

#include "differential/net.h"
#include "support/temporary_folder.h"

namespace ddp::differential {

using testing::TemporaryFolder;

DDP_SOURCE(
    row_of,
    /// The input and the target of a sample.
    inline at::Tensor row_of(int64_t number) { return values(2000 + 7 * number, {8}); });

DDP_SOURCE(
    tar_entry,
    /// A file in a tar file.
    inline std::string tar_entry(const std::string& name, const std::string& bytes) {
      std::string header(512, '\0');
      const auto put = [&](size_t at, const std::string& text) {
        header.replace(at, text.size(), text);
      };
      const auto octal = [](size_t value, int digits) {
        std::string text;
        for (int i = digits - 1; i >= 0; --i)
          text.push_back(static_cast<char>('0' + (value >> (3 * i)) % 8));
        return text;
      };
      put(0, name);
      put(100, "0000644");
      put(124, octal(bytes.size(), 11));
      put(136, octal(0, 11));
      put(148, "        0");  // the sum is made with spaces in its place; a plain file
      put(257, "ustar");
      put(263, "00");
      size_t sum = 0;
      for (const unsigned char one : header) sum += one;
      put(148, octal(sum, 6) + std::string(1, '\0'));
      return header + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
    });

DDP_SOURCE(
    stream_files,
    /// Files of lines, of tokens, or tar files, with as many of them as `sizes` says: 0, 1, ...
    inline std::vector<std::string> stream_files(
        const std::vector<int>& sizes, const std::string& kind) {
      static const TemporaryFolder folder;
      std::vector<std::string> files;
      int next = 0;
      for (const int size : sizes) {
        std::string text;
        for (int i = 0; i < (kind == "tokens" ? 2 * size + 1 : size); ++i, ++next) {
          const auto number = std::to_string(next);
          if (kind == "tokens") {
            text.push_back(static_cast<char>(next % 256));
            text.push_back(static_cast<char>(next / 256));
          } else if (kind == "tar") {
            text += tar_entry(number + ".num", number);
            text += tar_entry(number + ".more", std::string(static_cast<size_t>(next) % 700, 'x'));
          } else {
            text += number + "\n";
          }
        }
        if (kind == "tar") text.append(1024, '\0');
        const auto name = std::to_string(sizes[0]) + kind + std::to_string(sizes[1]) + "_";
        files.push_back(folder.write(name + std::to_string(files.size()), text));
      }
      return files;
    });

DDP_SOURCE(
    sizes_of,
    /// Of files; where ranks have whole ones, each has some samples.
    inline std::vector<int> sizes_of(bool short_epochs, bool by_shard) {
      if (short_epochs) return {11, by_shard ? 5 : 0, 6, 4, 3};
      return {130, by_shard ? 40 : 0, 170, 100, 100};
    });

DDP_SOURCE(
    files_of,
    /// They are written once, for all ranks read them.
    inline const std::vector<std::string>& files_of(
        const std::string& kind, bool short_epochs, bool by_shard) {
      static const auto all = [] {
        std::map<std::string, std::vector<std::string>> files;
        for (const std::string of : {"lines", "tokens", "tar"}) {
          for (const int which : {0, 1, 2, 3})
            files[of + std::to_string(which)] =
                stream_files(sizes_of(which % 2 == 1, which >= 2), of);
        }
        return files;
      }();
      const int which = (by_shard ? 2 : 0) + (short_epochs ? 1 : 0);
      return all.at(kind + std::to_string(which));
    });

DDP_SOURCE(
    stream_source,
    /// Rows by the names of the program's choices.
    inline StreamSource<at::Tensor> stream_source(
        const std::string& kind, bool short_epochs, bool by_shard) {
      const int64_t count = short_epochs ? 24 : 500;
      const auto numbers_from = [count](int64_t first) {
        return [n = first, count]() mutable {
          return n < count ? std::optional<int64_t>(n++) : std::nullopt;
        };
      };
      const auto row = [](int64_t number) { return row_of(number); };
      if (kind == "generator") return transform(from_generator(numbers_from), row);
      if (kind == "drawn_again")
        return transform(from_generator([numbers_from] { return numbers_from(0); }), row);
      const bool is_tar = kind == "tar" || kind == "tar_views";
      const auto& files = files_of(
          is_tar             ? "tar"
          : kind == "tokens" ? kind
                             : "lines",
          short_epochs, by_shard);
      if (kind == "tar") {
        return transform(tar_shards(files), [](const std::map<std::string, std::string>& sample) {
          return row_of(std::stoll(sample.at("num")));
        });
      }
      if (kind == "tar_views") {
        return transform(tar_views(files), [](const TarView& sample) {
          const auto& bytes = sample.files.at("num");
          const auto* begin = static_cast<const char*>(bytes.const_data_ptr());
          return row_of(std::stoll(std::string(begin, begin + bytes.numel())));
        });
      }
      const auto of_pair = [](const at::Tensor& pair) {
        return row_of(pair[0].item<int64_t>() * 1000 + pair[1].item<int64_t>());
      };
      if (kind == "tokens") return transform(packed_tokens(files, 2), of_pair);
      if (kind == "lines")
        return transform(
            lines(files), [](const std::string& line) { return row_of(std::stoll(line)); });
      const auto document = [](const std::string& line) {
        const auto number = std::stoll(line);
        return std::vector<int64_t>(static_cast<size_t>(1 + number % 3), number);
      };
      return transform(packed(transform(lines(files), document), 2, 999), of_pair);
    });

DDP_SOURCE(
    next_rows,
    /// [rows, 8]
    inline at::Tensor next_rows(BatchStream<ShardedStream<at::Tensor>>& batches, int64_t rows) {
      std::vector<at::Tensor> result{torch::empty({0, 8}, torch::kDouble)};
      for (int64_t i = 0; i < rows; ++i) {
        auto row = batches.next();
        TORCH_CHECK(row, "the stream has ended");
        result.push_back(row->unsqueeze(0));
      }
      return torch::cat(result);
    });

DDP_SOURCE(
    stack_rows,
    inline at::Tensor stack_rows(std::vector<at::Tensor> rows) { return torch::stack(rows); });
DDP_SOURCE(
    BatchesOfRows,
    using BatchesOfRows = BatchedStream<at::Tensor, at::Tensor (*)(std::vector<at::Tensor>)>);
DDP_SOURCE(
    next_batch,
    /// The same of a stream of batches that have as many rows.
    inline at::Tensor next_rows(BatchStream<BatchesOfRows>& batches, int64_t rows) {
      auto batch = batches.next();
      TORCH_CHECK(batch, "the stream has ended");
      TORCH_CHECK(batch->size(0) == rows, "a batch of ", batch->size(0), " rows");
      return *batch;
    });

/// Input and target of a batch.
struct RowsOfBatch {
  at::Tensor x, target;
};
/// [rows, 8] in two.
inline RowsOfBatch halves(const at::Tensor& rows) {
  return {rows.narrow(1, 0, 4).contiguous(), rows.narrow(1, 4, 4).contiguous()};
}

/// The replica's rows of a batch in a program whose batches come of a stream, by what the
/// documentation says of its order and of the ranks' turns.
RowsOfBatch batch_of_stream(const Program& program, int step, int batch, int replica);

}  // namespace ddp::differential
