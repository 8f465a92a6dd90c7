#include "membership/member.h"

#include <algorithm>

#include <ddp/internal/membership/reform.h>

namespace ddp::membership {

namespace {

constexpr Member::Time kAliveEvery(1000);
// Before the coordinator has told its own.
constexpr Member::Time kLostAfter(10000);
constexpr Member::Time kWait(600000);

Member::Time lost_after(const std::optional<You>& you) {
  return you ? Member::Time(you->lost_after_ms) : kLostAfter;
}

}  // namespace

Member::Member(Hello hello, Time now)
    : hello_(std::move(hello)), heard_(now), next_alive_(now + kAliveEvery) {
  orders_.emplace_back(Connect{});
}

void Member::on_connected(Time now) {
  if (stage_ == Stage::Over) return;
  connected_ = true;
  heard_ = now;
  introduce();
}

void Member::on_disconnected(Time now) {
  if (stage_ == Stage::Over || !connected_) return;
  connect_again(now);
}

void Member::connect_again(Time now) {
  connected_ = false;
  heard_ = now;
  orders_.emplace_back(Connect{});
}

void Member::introduce() {
  if (generation_ == 0) {
    send(hello_);
  } else {
    Back back{hello_.token, hello_.id, hello_.slot, hello_.pid, hello_.host};
    back.generation = generation_;
    back.trains = stage_ == Stage::Training || stage_ == Stage::Paused || stage_ == Stage::Done;
    send(back);
  }
  resend_state();
}

void Member::resend_state() {
  if (stage_ == Stage::Ready) send(Waits{});
  if (stage_ == Stage::Reported) send(report_);
  const bool meets = stage_ == Stage::Placed || stage_ == Stage::Met;
  if (meets && form_.members.front().id == hello_.id && !store_.empty()) {
    send(Store{generation_, store_});
  }
  if (stage_ == Stage::Met) send(Met{generation_});
  const bool trains = stage_ == Stage::Training || stage_ == Stage::Paused || stage_ == Stage::Done;
  if (trains) send(Entered{generation_});
  if (stage_ == Stage::Broken) send(lost_);
  if (stage_ == Stage::Paused) send(Pauses{generation_});
  if (stage_ == Stage::Done) send(Done{});
  if (leaves_) send(Leaves{});
}

void Member::on_message(Time now, const CoordinatorMessage& message) {
  if (stage_ == Stage::Over) return;
  heard_ = now;
  std::visit(
      [&](const auto& line) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(line)>, Alive>) take(now, line);
      },
      message);
}

void Member::take(Time /*now*/, const You& you) {
  you_ = you;
  hello_.slot = you.slot;
  if (stage_ == Stage::Starting) stage_ = Stage::Preparing;
}

void Member::take(Time /*now*/, const Reached& reached) { reached_at_ = reached.host; }

void Member::take(Time /*now*/, const Change& /*change*/) { change_ = true; }

void Member::take(Time /*now*/, const Gather& gather) {
  // A ready process gets it where the Form that made it a member was lost.
  if (stage_ < Stage::Ready || gather.generation <= generation_) return;
  generation_ = gather.generation;
  stage_ = Stage::Asked;
  why_ = gather.why.value;
  orders_.emplace_back(Stop{gather.why.value});
}

void Member::take(Time /*now*/, const Form& form) {
  const bool joins = stage_ == Stage::Ready && form.generation > generation_;
  const bool follows = stage_ == Stage::Reported && form.generation == generation_;
  if (!joins && !follows) return;
  generation_ = form.generation;
  form_ = form;
  store_.clear();
  change_ = false;
  stage_ = Stage::Placed;
}

void Member::take(Time now, const Reform& change) {
  if (const auto form = apply(change, form_)) take(now, *form);
}

void Member::take(Time /*now*/, const Store& store) {
  if (stage_ == Stage::Placed && store.generation == generation_) store_ = store.address;
}

void Member::take(Time /*now*/, const Fenced& fenced) {
  finish(Ending::Fenced, 1, fenced.why.value);
}

void Member::take(Time /*now*/, const membership::End& end) {
  finish(end.code == 0 ? Ending::Left : Ending::Failed, end.code, end.why.value);
}

void Member::finish(Ending how, int code, const std::string& why) {
  stage_ = Stage::Over;
  end_ = {how, code, why};
  connected_ = false;
  if (how != Ending::Left) orders_.emplace_back(Stop{why});
  orders_.emplace_back(Disconnect{});
}

void Member::on_time(Time now) {
  if (stage_ == Stage::Over) return;
  if (connected_ && now >= next_alive_) send(Alive{});
  if (now >= next_alive_) next_alive_ = now + kAliveEvery;
  if (connected_ && now >= heard_ + lost_after(you_)) {
    orders_.emplace_back(Disconnect{});
    connect_again(now);
  }
  if (!connected_ && waits_for_coordinator() && now >= heard_ + longest_wait()) {
    const bool has_left = coordinator_patience_ && stage_ == Stage::Done;
    finish(has_left ? Ending::Left : Ending::Failed, 1, "the coordinator cannot be reached");
  }
}

Member::Time Member::next_time() const {
  const auto limit = connected_ ? lost_after(you_) : longest_wait();
  const bool limited = connected_ || waits_for_coordinator();
  return limited ? std::min(next_alive_, heard_ + limit) : next_alive_;
}

/// A member that trains needs no coordinator, unless it is to leave at once.
bool Member::waits_for_coordinator() const {
  const bool trains = stage_ == Stage::Training || stage_ == Stage::Preparing;
  return !trains || (leaves_ && coordinator_patience_);
}

Member::Time Member::longest_wait() const {
  const auto wait = you_ ? Time(you_->wait_ms) : kWait;
  return coordinator_patience_ ? std::min(*coordinator_patience_, wait) : wait;
}

void Member::ready() {
  if (stage_ != Stage::Preparing) return;
  stage_ = Stage::Ready;
  send(Waits{});
}

void Member::report(int64_t generation, int64_t applied, int64_t turns, Holding holding) {
  if (stage_ != Stage::Asked || generation != generation_) return;
  stage_ = Stage::Reported;
  report_ = {generation, applied, turns, holding, form_.generation};
  send(report_);
}

void Member::store(const std::string& address) {
  if (stage_ != Stage::Placed) return;
  store_ = address;
  send(Store{generation_, address});
}

void Member::met(int64_t generation) {
  if (stage_ != Stage::Placed || generation != generation_) return;
  stage_ = Stage::Met;
  send(Met{generation});
}

void Member::entered(int64_t generation) {
  if (stage_ != Stage::Met || generation != generation_) return;
  stage_ = Stage::Training;
  send(Entered{generation});
}

void Member::lost(
    Time now, int64_t generation, std::vector<ProcessId> accused, const std::string& why) {
  const bool has_group = stage_ >= Stage::Placed && stage_ < Stage::Over;
  if (!has_group || stage_ == Stage::Broken || generation != generation_) return;
  stage_ = Stage::Broken;
  if (!connected_) heard_ = now;
  lost_ = {generation, std::move(accused), {why}};
  send(lost_);
}

void Member::threw(int64_t applied, const std::string& why) {
  if (stage_ == Stage::Over) return;
  send(Threw{applied, {why}});
  finish(Ending::Failed, 1, why);
}

void Member::pause(Time now, int64_t generation) {
  if (stage_ != Stage::Training || generation != generation_) return;
  stage_ = Stage::Paused;
  if (!connected_) heard_ = now;
  send(Pauses{generation});
}

void Member::leave() {
  if (stage_ == Stage::Over || std::exchange(leaves_, true)) return;
  send(Leaves{});
}

void Member::done(Time now, int64_t generation) {
  if (stage_ != Stage::Training || generation != generation_) return;
  stage_ = Stage::Done;
  if (!connected_) heard_ = now;
  send(Done{});
}

void Member::disconnect_without_reply() {
  if (stage_ != Stage::Over) finish(Ending::Failed, 1, "this process ends");
}

/// A message that is sent without a connection is lost: introduce() repeats those that matter.
void Member::send(const MemberMessage& message) {
  if (connected_) orders_.emplace_back(Send{message});
}

}  // namespace ddp::membership
