// Batches that come of a ShardedStream: its sources, a rank's rows of it, and those that one
// process knows of.
#pragma once

#include <algorithm>
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
    stream_files,
    /// Files of lines, or of tokens, with as many of them as `sizes` says: 0, 1, ...
    inline std::vector<std::string> stream_files(const std::vector<int>& sizes, bool tokens) {
      static const TemporaryFolder folder;
      std::vector<std::string> files;
      int next = 0;
      for (const int size : sizes) {
        std::string text;
        for (int i = 0; i < (tokens ? 2 * size + 1 : size); ++i, ++next) {
          if (tokens) {
            text.push_back(static_cast<char>(next % 256));
            text.push_back(static_cast<char>(next / 256));
          } else {
            text += std::to_string(next) + "\n";
          }
        }
        const auto name = std::to_string(sizes[0]) + (tokens ? "t" : "l");
        files.push_back(folder.write(name + std::to_string(files.size()), text));
      }
      return files;
    });

DDP_SOURCE(
    files_of,
    /// They are written once, for all ranks read them.
    inline const std::vector<std::string>& files_of(bool tokens, bool short_epochs) {
      static const std::vector<std::vector<std::string>> all{
          stream_files({130, 0, 170, 100, 100}, false), stream_files({11, 0, 6, 4, 3}, false),
          stream_files({130, 0, 170, 100, 100}, true), stream_files({11, 0, 6, 4, 3}, true)};
      return all[static_cast<size_t>((tokens ? 2 : 0) + (short_epochs ? 1 : 0))];
    });

DDP_SOURCE(
    stream_source,
    /// Rows by the names of the program's choices.
    inline StreamSource<at::Tensor> stream_source(const std::string& kind, bool short_epochs) {
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
      const auto of_pair = [](const at::Tensor& pair) {
        return row_of(pair[0].item<int64_t>() * 1000 + pair[1].item<int64_t>());
      };
      const auto& files = files_of(kind == "tokens", short_epochs);
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
