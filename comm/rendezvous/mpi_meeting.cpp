#include "rendezvous/mpi_meeting.h"

namespace ddp {

MpiMeeting*& mpi_meeting() {
  static MpiMeeting* meeting = nullptr;
  return meeting;
}

}  // namespace ddp
