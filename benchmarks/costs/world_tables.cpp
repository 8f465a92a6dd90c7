// Tables of all ranks: a checkpoint's, an elastic job's, and the store's of the start.
#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/ones.h>
#include <ddp/consolidate_checkpoint.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "files/folder.h"
#include "files/manifest.h"
#include "launch/membership/membership.h"
#include "monitor/job_monitor.h"
#include "python/torch_file.h"
#include "store/startup_barrier.h"
#include "worlds.h"

namespace costs {
namespace {

constexpr int kTensors = 8;
constexpr int64_t kStep = 1;
constexpr int64_t kColumns = 3;

using Layouts = std::vector<std::vector<ddp::ShardLayout>>;

/// Each rank has a row of each tensor, or some columns of all rows.
Layouts layouts_of(int ranks, bool by_columns) {
  Layouts layouts(static_cast<size_t>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      ddp::ShardLayout layout;
      layout.name = ddp::str("layers.", tensor, ".weight");
      layout.kind.sizes = {ranks, kColumns};
      layout.box = {{rank, 0}, {1, kColumns}};
      if (by_columns) {
        std::reverse(layout.kind.sizes.begin(), layout.kind.sizes.end());
        layout.box = {{0, rank}, {kColumns, 1}};
      }
      layouts[static_cast<size_t>(rank)].push_back(std::move(layout));
    }
  }
  return layouts;
}

ddp::Manifest manifest_of(int ranks) {
  ddp::Manifest manifest;
  manifest.step = kStep;
  manifest.world_size = ranks;
  manifest.library_version = manifest.libtorch_version = "0";
  for (int rank = 0; rank < ranks; ++rank) {
    manifest.files.push_back({ddp::shard_file("model", rank), {}});
  }
  manifest.index["model"] = ddp::make_index("model", layouts_of(ranks, false));
  return manifest;
}

void write_checkpoint(int ranks, const std::string& path) {
  auto manifest = manifest_of(ranks);
  const auto step = ddp::CheckpointFolder(path).path_of(kStep);
  ddp::make_folders(step);
  std::map<std::string, c10::impl::GenericDict> dicts;
  for (const auto& [name, tensor] : manifest.index.at("model")) {
    for (const auto& box : tensor.boxes) {
      const auto value = at::ones(box.box.size);
      dicts.try_emplace(box.file, ddp::make_dict()).first->second.insert(box.key, value);
    }
  }
  for (auto& file : manifest.files) {
    const auto file_path = ddp::str(step, "/", file.name);
    const auto& dict = dicts.at(file.name);
    ddp::replace_torch_file(file_path, [&]() -> c10::IValue { return dict; });
    file.sum = ddp::sum_of_file(file_path);
  }
  ddp::write_whole_file(ddp::str(step, "/", ddp::kManifestName), to_json(manifest));
}

/// An elastic job of members that lose one, and take one in. Only the coordinator's work.
class Change {
 public:
  using Membership = ddp::launch::Membership;

  explicit Change(int ranks) : machine_(limits_of(ranks), Membership::Time(0)) {
    for (int i = 0; i < ranks; ++i) join(i, i);
    enter();
  }

  void lose_one_and_take_one() {
    const auto lost = members_.begin()->first;
    const int slot = members_.at(lost);
    machine_.on_exited(now(), slot, 100 + lost, "was killed");
    members_.erase(lost);
    follow();
    using ddp::membership::Holding;
    const ddp::membership::Report report{number_, ++step_, 0, Holding::Whole, formed_};
    for (const auto& [connection, its_slot] : members_) say(connection, report);
    (void)machine_.next_time();
    join(1 + members_.rbegin()->first, slot);
    enter();
  }

 private:
  static ddp::launch::MembershipLimits limits_of(int ranks) {
    ddp::launch::MembershipLimits limits;
    limits.slots = limits.max_ranks = limits.min_ranks = ranks;
    return limits;
  }

  Membership::Time now() const { return Membership::Time(1); }

  void join(int connection, int slot) {
    members_[connection] = slot;
    const auto id = static_cast<ddp::membership::ProcessId>(connection + 1);
    say(connection, ddp::membership::Hello{"t", id, slot, 100 + connection, "h"});
    say(connection, ddp::membership::Waits{});
  }

  void enter() {
    for (const auto& [connection, slot] : members_) {
      say(connection, ddp::membership::Met{number_});
      say(connection, ddp::membership::Entered{number_});
    }
    (void)machine_.next_time();
  }

  void say(int connection, const ddp::membership::MemberMessage& message) {
    machine_.on_message(now(), connection, message);
    follow();
  }

  void follow() {
    for (const auto& order : machine_.take_orders()) {
      const auto* send = std::get_if<Membership::Send>(&order);
      if (send == nullptr) continue;
      if (const auto* form = std::get_if<ddp::membership::Form>(&send->message)) {
        number_ = formed_ = form->generation;
      } else if (const auto* change = std::get_if<ddp::membership::Reform>(&send->message)) {
        number_ = formed_ = change->generation;
      } else if (const auto* gather = std::get_if<ddp::membership::Gather>(&send->message)) {
        number_ = gather->generation;
      }
    }
  }

  Membership machine_;
  std::map<int, int> members_;  // connection and slot
  int64_t number_ = 0;
  int64_t formed_ = 0;  // the generation whose form the members have
  int64_t step_ = 0;
};

/// Counts operations, and the keys that they read.
class CountingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++operations;
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override {
    ++operations;
    return HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++operations;
    ++keys_read;
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++operations;
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++operations;
    return HashStore::check(keys);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++operations;
    keys_read += static_cast<int64_t>(keys.size());
    return HashStore::multiGet(keys);
  }

  std::atomic<int64_t> operations{0}, keys_read{0};
};

StoreRow count(
    const std::string& what, int ranks,
    const std::function<void(const c10::intrusive_ptr<CountingStore>&, int)>& of_rank) {
  const auto store = c10::make_intrusive<CountingStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { of_rank(store, rank); });
  }
  for (auto& thread : threads) thread.join();
  return {what, store->operations, store->keys_read};
}

}  // namespace

std::vector<WorldRow> rows_of_tables(int ranks, const std::string& folder) {
  const auto rows = std::make_shared<Layouts>(layouts_of(ranks, false));
  const auto columns = std::make_shared<Layouts>(layouts_of(ranks, true));
  const auto manifest = std::make_shared<ddp::Manifest>(manifest_of(ranks));
  const auto json = std::make_shared<std::string>(to_json(*manifest));
  const auto missing = std::make_shared<std::vector<int>>();
  for (int rank = 0; rank < ranks; rank += 2) missing->push_back(rank);
  const auto job = std::make_shared<Change>(ranks);
  return {
      {"the layouts of all ranks, from their texts",
       [rows] {
         auto read = std::make_shared<std::vector<ddp::RankLayouts>>();
         for (const auto& of_rank : *rows) {
           read->push_back(ddp::layouts_from(ddp::to_text({{"model", of_rank}})));
         }
         return read;
       }},
      {"a checkpoint's index, tensors cut by rows",
       [rows] { return std::make_shared<ddp::ShardIndex>(ddp::make_index("model", *rows)); }},
      {"a checkpoint's index, tensors cut by columns",
       [columns] { return std::make_shared<ddp::ShardIndex>(ddp::make_index("model", *columns)); }},
      {"a manifest is written",
       [manifest] { return std::make_shared<std::string>(to_json(*manifest)); }},
      {"a manifest is read",
       [json] { return std::make_shared<ddp::Manifest>(ddp::parse_manifest(*json, "m")); }},
      {"ddp_consolidate",
       [ranks, folder] {
         const auto step = ddp::CheckpointFolder(folder).path_of(kStep);
         if (ddp::kind_of_path(step) == ddp::PathKind::Nothing) write_checkpoint(ranks, folder);
         ddp::consolidate_checkpoint(folder, kStep, folder + "/whole.pt");
         return nullptr;
       }},
      {"the text of every second rank",
       [missing] { return std::make_shared<std::string>(ddp::ranks_text(*missing)); }},
      {"a change of members, at the coordinator", [job] {
         job->lose_one_and_take_one();
         return nullptr;
       }}};
}

std::vector<StoreRow> rows_of_store(int ranks) {
  const auto deadline = ddp::Deadline(std::chrono::minutes(5));
  return {
      count(
          "the startup barrier", ranks,
          [&](const auto& store, int rank) {
            ddp::run_startup_barrier({store, rank, ranks, deadline, "costs"}, "claim");
          }),
      count("the monitor's addresses", ranks, [&](const auto& store, int rank) {
        ddp::JobMonitor::Setup setup;
        setup.rank = rank;
        setup.size = ranks;
        ddp::JobMonitor::connect(std::move(setup), *store);
      })};
}

}  // namespace costs
