#pragma once

#include <exception>

#include <ddp/elastic_errors.h>
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
  } catch (const AgreedError&) {
    return false;  // the others throw it, too, and may have left already
  } catch (const c10::Error&) {
    return generations.has_ended();
  } catch (...) {
    return false;
  }
}

}  // namespace ddp::elastic
