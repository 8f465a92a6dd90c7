#include "local_sgd/diloco/elastic_leaders.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/start_thread.h>
#include <ddp/internal/text.h>

#include "elastic/flat_state.h"
#include "elastic/recoverable.h"
#include "local_sgd/diloco/exchange.h"

namespace ddp {
namespace {

// From one tick to the next where no region calls for an exchange.
constexpr std::chrono::milliseconds kTick(200);
// For a coordinator that cannot be reached, and may be started again: by a region that leaves, or
// is done with all others. One that has finished before others waits as they do: a coordinator that
// was started again goes on once the majority is back.
constexpr std::chrono::seconds kLeavesWithoutCoordinator(1);
// The bytes of a state between two ticks: more where the link takes them in less than a tick.
constexpr int64_t kFirstPiece = int64_t{4} << 20;
constexpr int64_t kLargestPiece = int64_t{64} << 20;
constexpr int kStateTag = 0x4449;

std::string text_of_state(const OuterState& state) {
  // The parts, which are text already and may be gigabytes, are not pickled once more.
  return packed(
      {elastic::packed_state(c10::ivalue::Tuple::create(state.round, state.outer, state.momentum)),
       state.parts});
}

OuterState state_of_text(const std::string& text) {
  auto texts = unpacked(text);
  const auto state = elastic::unpacked_state(texts.at(0));
  const auto& fields = state.toTupleRef().elements();
  return {
      fields.at(0).toInt(), fields.at(1).toTensor(), fields.at(2).toTensor(),
      std::move(texts.at(1))};
}

std::string other_settings(const std::string& theirs, const std::string& others, int rank) {
  return ddp::str(
      "DiLoCo: expected the same options and parameters in all regions, got [", theirs, "] and [",
      others, "] in that of the leaders' rank ", rank, ". Make it alike everywhere.");
}

}  // namespace

ElasticLeaders::ElasticLeaders(Settings settings, at::Tensor outer)
    : settings_(std::move(settings)),
      generations_(Generations::Settings{settings_.coordinator, /*slot=*/-1, settings_.group}),
      outer_(std::move(outer)),
      piece_(kFirstPiece) {
  thread_ = start_thread([this] { run(); });
}

ElasticLeaders::~ElasticLeaders() {
  std::unique_lock lock(mutex_);
  stops_ = true;
  lock.unlock();
  changed_.notify_all();
  problem_of([&] {
    generations_.set_coordinator_patience(kLeavesWithoutCoordinator);
    generations_.leave();  // the thread may wait for other regions
  });
  lock.lock();
  const bool has_ended =
      changed_.wait_for(lock, settings_.leaves_within, [this] { return has_ended_; });
  lock.unlock();
  if (!has_ended) problem_of([&] { generations_.disconnect_without_reply(); });
  thread_.join();
}

void ElasticLeaders::offer(OuterState state) {
  const std::lock_guard lock(mutex_);
  offered_ = std::move(state);
}

std::shared_future<at::Tensor> ElasticLeaders::exchange(Difference difference) {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  DDP_CHECK(
      !stops_,
      "DiLoCo: expected no step after finish(), with which all regions have ended their training, "
      "got an exchange. Call finish() after the last step.");
  wanted_.emplace(Wanted{std::move(difference), {}, Clock::now()});
  auto mean = wanted_->mean.get_future().share();
  lock.unlock();
  changed_.notify_all();
  return mean;
}

// The others count on it.
void ElasticLeaders::drop(const std::shared_future<at::Tensor>& /*mean*/) noexcept {}

std::vector<int64_t> ElasticLeaders::regions() const {
  const std::lock_guard lock(mutex_);
  return regions_;
}

std::shared_future<void> ElasticLeaders::finish() {
  {
    const std::lock_guard lock(mutex_);
    is_finished_ = true;
  }
  changed_.notify_all();
  return finished_future_;
}

void ElasticLeaders::run() {
  const at::NoGradGuard no_grad;
  try {
    begin();
    while (!is_over_) {
      try {
        if (!group_ && !enter_next()) break;
        tick();
      } catch (...) {
        if (!elastic::is_recoverable(std::current_exception(), generations_)) throw;
        group_ = {};
      }
    }
    group_ = {};
    end(std::make_exception_ptr(readable_error<RankLost>(
        DDP_HERE, "DiLoCo: this region has left, or all regions have ended their training.")));
  } catch (...) {
    const auto error = std::current_exception();
    problem_of([&] { generations_.threw(exchanges_, text_of(error)); });
    group_ = {};
    end(error);
  }
}

void ElasticLeaders::begin() {
  try {
    DDP_CHECK(enter_next(), "DiLoCo: expected regions that train, but they have ended.");
  } catch (...) {
    met_.set_exception(std::current_exception());
    throw;
  }
  // Also of a region that came before the others trained, and had to wait.
  joins_ = !has_state_;
  outer_ = at::Tensor();
  met_.set_value();
}

/// Completes all pending promises with `error`.
void ElasticLeaders::end(const std::exception_ptr& error) {
  std::optional<Wanted> wanted;
  {
    const std::lock_guard lock(mutex_);
    wanted = std::exchange(wanted_, std::nullopt);
    if (is_over_) {
      stops_ = true;
    } else {
      failure_ = error;
    }
  }
  if (wanted) wanted->mean.set_exception(error);
  if (joins_ && !has_state_) joined_.set_exception(error);
  if (is_over_) {
    finished_.set_value();
  } else {
    finished_.set_exception(error);
  }
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  changed_.notify_all();
}

/// \return false: this region has left, or the job is done.
bool ElasticLeaders::enter_next() {
  using Kind = HeldState::Kind;
  for (;;) {
    const auto form =
        generations_.next({has_state_ ? Kind::Whole : Kind::None, exchanges_, /*turns=*/0});
    if (!form) return false;
    auto met = generations_.meet(*form);
    if (!met) continue;
    try {
      catch_up(met, *form);
    } catch (...) {
      if (!elastic::is_recoverable(std::current_exception(), generations_)) throw;
      continue;
    }
    group_ = std::move(met);
    slots_ = form->slots;
    drop_state();
    joining_.reset();
    generations_.entered();
    return true;
  }
}

/// Regions that lack the last mean get it from those that have it.
void ElasticLeaders::catch_up(const ProcessGroup& group, const GenerationForm& form) {
  const auto texts = gather_strings(
      packed({settings_.text, has_state_ ? "1" : "", ddp::str(exchanges_, " ", last_.fragment)}),
      group, "regions of DiLoCo meet");
  std::vector<std::string> settings;
  for (const auto& text : texts) settings.push_back(unpacked(text).at(0));
  if (form.sources.empty()) return begin_together(settings, group);

  int64_t newest = -1, fragment = 0, oldest = -1;
  int source = -1;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto fields = unpacked(texts[rank]);
    if (fields.at(1).empty()) continue;
    int64_t exchanges = 0, its_fragment = 0;
    InputText(fields.at(2)) >> exchanges >> its_fragment;
    oldest = oldest < 0 ? exchanges : std::min(oldest, exchanges);
    if (exchanges <= newest) continue;
    newest = exchanges;
    fragment = its_fragment;
    source = static_cast<int>(rank);
  }
  if (!has_state_) {
    const auto& theirs = settings.at(static_cast<size_t>(source));
    DDP_CHECK(theirs == settings_.text, other_settings(theirs, settings_.text, group->getRank()));
  }
  if (oldest < newest) {
    const bool has_it = has_state_ && exchanges_ == newest;
    auto mean =
        has_it
            ? last_.mean
            : at::empty({settings_.fragment_sizes.at(static_cast<size_t>(fragment))}, at::kFloat);
    broadcast(mean, source, group);
    if (has_state_ && !has_it) deliver({fragment, mean});
  }
  exchanges_ = newest;
}

void ElasticLeaders::begin_together(
    const std::vector<std::string>& settings, const ProcessGroup& group) {
  for (size_t rank = 1; rank < settings.size(); ++rank) {
    if (settings[rank] == settings[0]) continue;
    throw readable_error<AgreedError>(
        DDP_HERE, other_settings(settings[0], settings[rank], static_cast<int>(rank)));
  }
  DDP_CHECK(
      outer_.defined(),
      "DiLoCo: expected a region that has the state, got none that is left: those that began "
      "together are lost. Start all regions again.");
  auto first = outer_.clone();  // a loss may end it halfway
  broadcast(first, /*src=*/0, group);
  outer_.copy_(first);
  has_state_ = true;
}

ElasticLeaders::Note ElasticLeaders::own_note() {
  std::unique_lock lock(mutex_);
  const auto has_news = [this] { return wanted_ || stops_ || is_finished_; };
  if (!state_travels_ && on_its_way_.empty()) changed_.wait_for(lock, kTick, has_news);
  Note note = {};
  if (wanted_) {
    const auto& difference = wanted_->difference;
    const auto waits =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - wanted_->since);
    note.is_ready = 1;
    note.round = difference.round;
    note.step = difference.step;
    note.fragment = difference.fragment;
    note.waits_ms = waits.count();
  }
  note.has_state = has_state_;
  note.is_finished = is_finished_;
  note.wants_change = generations_.change_is_wanted();
  note.bytes_to_send = has_state_ ? static_cast<int64_t>(on_its_way_.size() - sent_) : 0;
  note.piece = std::min(note.bytes_to_send, piece_);
  return note;
}

std::vector<ElasticLeaders::Note> ElasticLeaders::gather_notes(const Note& own) const {
  constexpr int64_t kNumbers = sizeof(Note) / sizeof(int64_t);
  auto number = at::empty({kNumbers}, at::kLong);
  std::memcpy(number.mutable_data_ptr(), &own, sizeof own);
  auto all = at::empty({group_->getSize(), kNumbers}, at::kLong);
  all_gather_into_tensor(all, number, group_);
  std::vector<Note> notes(static_cast<size_t>(group_->getSize()));
  std::memcpy(notes.data(), all.const_data_ptr(), all.nbytes());
  return notes;
}

void ElasticLeaders::tick() {
  const auto notes = gather_notes(own_note());
  const auto any = [&](const auto& holds) { return any_of(notes, holds); };
  if (any([](const Note& note) { return note.wants_change != 0; })) {
    generations_.pause();
    group_ = {};
    return;
  }
  const auto trains = [](const Note& note) { return note.has_state != 0 && note.is_finished == 0; };
  const auto first = find_if(notes, trains);
  if (first == notes.end()) return end_with_others(has_state_);
  gives_state_ = first - notes.begin() == group_->getRank() &&
                 any([](const Note& note) { return note.has_state == 0; });
  const auto sender = find_if(notes, [](const Note& note) { return note.bytes_to_send > 0; });
  state_travels_ = sender != notes.end();
  if (state_travels_) return send_piece(static_cast<int>(sender - notes.begin()), notes);
  if (any([&](const Note& note) { return trains(note) && note.is_ready == 0; })) {
    return leave_if_too_late(notes);
  }
  exchange_with(notes);
}

/// The others do not wait for ever for a region whose steps take too long, or stand still.
void ElasticLeaders::leave_if_too_late(const std::vector<Note>& notes) const {
  const auto& own = notes[static_cast<size_t>(group_->getRank())];
  if (own.has_state == 0 || own.is_ready != 0 || own.is_finished != 0) return;
  int64_t waits = 0;
  for (const auto& note : notes) waits = std::max(waits, note.waits_ms);
  const auto limit = settings_.group.timeout() + join_took_;
  DDP_CHECK(
      waits <= limit.count(), "DiLoCo: expected this region's next exchange within ", limit.count(),
      " ms of the others', which wait for ", waits,
      " ms: they go on without it. Raise DiLoCoOptions::group()'s timeout, or start it again.");
}

void ElasticLeaders::exchange_with(const std::vector<Note>& notes) {
  std::vector<int64_t> counted, regions;
  for (size_t rank = 0; rank < notes.size(); ++rank) {
    if (notes[rank].is_ready == 0 || notes[rank].has_state == 0) continue;
    counted.push_back(static_cast<int64_t>(rank));
    regions.push_back(slots_[rank]);
  }
  const auto& first = notes[static_cast<size_t>(counted.front())];
  for (const int64_t rank : counted) {
    const auto& note = notes[static_cast<size_t>(rank)];
    if (note.round == first.round && note.step == first.step && note.fragment == first.fragment) {
      continue;
    }
    throw readable_error<AgreedError>(
        DDP_HERE,
        ddp::str(
            "DiLoCo: expected all regions at the same step and round, got step ", first.step,
            " in round ", first.round, " in region ", regions.front(), " and step ", note.step,
            " in round ", note.round, " in region ", slots_[static_cast<size_t>(rank)],
            ". Load checkpoints of the same step everywhere."));
  }
  const bool is_counted = notes[static_cast<size_t>(group_->getRank())].is_ready != 0;
  at::Tensor values;
  {
    const std::lock_guard lock(mutex_);
    const auto elements = settings_.fragment_sizes.at(static_cast<size_t>(first.fragment));
    values = is_counted ? wanted_->difference.values : at::zeros({elements}, at::kFloat);
  }
  const auto start = Clock::now();
  const Exchange exchange(settings_.wire, group_->getSize());
  const auto mean = exchange.run(values, group_, counted);
  seconds_sent_ = seconds_sent_ + std::chrono::duration<double>(Clock::now() - start).count();
  bytes_sent_ += exchange.bytes_sent(values.numel());
  ++exchanges_;
  if (!has_state_) joining_ = Joined{{}, first.step, first.fragment, mean, Clock::now()};
  {
    const std::lock_guard lock(mutex_);
    regions_ = std::move(regions);
    const bool gives = gives_state_ && counted.front() == group_->getRank() && offered_ &&
                       offered_->round == first.round;
    if (gives) on_its_way_ = text_of_state(*offered_);
    offered_.reset();
  }
  if (is_counted) {
    join_took_ = {};
    deliver({first.fragment, mean});
  } else {
    last_ = {first.fragment, mean};
  }
}

void ElasticLeaders::deliver(const Last& last) {
  last_ = last;
  std::optional<Wanted> wanted;
  {
    const std::lock_guard lock(mutex_);
    wanted = std::exchange(wanted_, std::nullopt);
  }
  if (wanted) wanted->mean.set_value(last.mean);
}

/// A piece of the state, from one region to all that watch.
void ElasticLeaders::send_piece(int source, const std::vector<Note>& notes) {
  const auto& theirs = notes[static_cast<size_t>(source)];
  const bool is_last = theirs.piece == theirs.bytes_to_send;
  if (!has_state_) {
    receive_piece(source, theirs.piece);
    if (is_last) join();
    return;
  }
  if (source != group_->getRank()) return;
  const auto message = at::from_blob(on_its_way_.data() + sent_, {theirs.piece}, at::kByte);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (size_t rank = 0; rank < notes.size(); ++rank) {
    if (notes[rank].has_state != 0) continue;
    works.push_back(send_async(message, static_cast<int>(rank), kStateTag, group_));
  }
  for (const auto& work : works) work->wait();
  choose_piece();
  sent_ += static_cast<size_t>(theirs.piece);
  if (is_last) drop_state();
}

/// The next piece is larger where the one before and its tick took less time than a tick is apart
/// from the next: between distant hosts each tick costs a way to and fro.
void ElasticLeaders::choose_piece() {
  const auto now = Clock::now();
  const auto took = now - std::exchange(piece_began_, now);
  if (sent_ > 0 && took < kTick) piece_ = std::min(2 * piece_, kLargestPiece);
  if (sent_ > 0 && took > 4 * kTick) piece_ = std::max(piece_ / 2, kFirstPiece);
}

void ElasticLeaders::join() {
  joining_->state = state_of_text(std::exchange(on_its_way_, {}));
  join_took_ =
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - joining_->watched);
  has_state_ = true;
  joined_.set_value(*std::exchange(joining_, std::nullopt));
}

void ElasticLeaders::drop_state() {
  on_its_way_ = {};
  sent_ = 0;
  piece_ = kFirstPiece;
  state_travels_ = false;
}

void ElasticLeaders::receive_piece(int source, int64_t bytes) {
  std::string piece(static_cast<size_t>(bytes), '\0');
  auto message = at::from_blob(piece.data(), {bytes}, at::kByte);
  recv(message, source, kStateTag, group_);
  on_its_way_ += piece;
}

void ElasticLeaders::end_with_others(bool has_state) {
  DDP_CHECK(
      has_state,
      "DiLoCo: expected regions that train, but they ended before this one joined them.");
  generations_.done();
  generations_.set_coordinator_patience(kLeavesWithoutCoordinator);
  is_over_ = generations_.wait_until_all_are_done();
  if (!is_over_) group_ = {};
}

}  // namespace ddp
