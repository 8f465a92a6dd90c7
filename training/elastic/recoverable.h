#pragma once

#include <exception>
#include <string>

#include <ddp/elastic_errors.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/membership/generations.h>

namespace ddp::elastic {

/// Whether a next generation can go on after this exception of what waits for the other ranks.
inline bool is_recoverable(const std::exception_ptr& error, const Generations& generations) {
  try {
    std::rethrow_exception(error);
  } catch (const RankLost&) {
    return true;
  } catch (const Fenced&) {
    return false;
  } catch (const QuorumLost&) {
    return false;
  } catch (const WrongRanks& error) {
    return !error.has_this_rank;  // the others go on without those
  } catch (const AgreedError&) {
    return false;  // the others throw it, too, and may have left already
  } catch (const c10::Error&) {
    return generations.has_ended();
  } catch (...) {
    return false;
  }
}

/// The text of a vote that found other ranks wrong; "" for another exception, and for none.
inline std::string text_of_vote(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const WrongRanks& wrong) {
    return text_of(wrong);
  } catch (...) {
  }
  return "";
}

}  // namespace ddp::elastic
