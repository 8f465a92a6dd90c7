#pragma once

#include <functional>

namespace ddp {

/// Runs `call` on a thread of its own, where the system's look-ups by DNS find nothing, at once.
///
/// For connecting to an address in numbers: c10d's sockets look up the name of each address that
/// they connect to, for their messages, and a name server that does not answer holds them up for 5
/// seconds or more. Many ranks that start together are such a case.
///
/// \param call  must not need a name. Its exception is thrown.
/// \return  how many look-ups found nothing.
///
/// Blocks: host, as long as `call`. Cost: two thread starts.
int without_name_lookups(const std::function<void()>& call);

}  // namespace ddp
