# Builds tests/consumer with ddp's sources: by FetchContent as libddp.so, and then, in the same build folder,
# by add_subdirectory as libddp.a. Both consist of the same objects, compiled once.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(REMOVE_RECURSE "${WORK_DIR}")

function(use_sources from shared library)
  use_as_consumer(build "${other_compiler}" ${oldest_standard} -DDDP_FROM=${from} "-DDDP_SOURCE=${SOURCE_DIR}"
    "-DTorch_DIR=${TORCH_DIR}" "-DDDP_WITH_CUDA=${WITH_CUDA}" -DBUILD_SHARED_LIBS=${shared}
    -DDDP_WITH_MPI=OFF -DCMAKE_UNITY_BUILD_BATCH_SIZE=40) # libddp_mpi.a is an archive of its own in both
  if(NOT EXISTS "${WORK_DIR}/build/_deps/ddp-build/${library}")
    message(FATAL_ERROR "${from}: expected ${library} in ${WORK_DIR}/build/_deps/ddp-build")
  endif()
  set(built "${built}" PARENT_SCOPE)
endfunction()

use_sources(FETCH ON libddp.so)
set(first "${built}")
use_sources(SUBDIRECTORY OFF libddp.a)
# Compiling takes a minute: that flags differ from one to the other should be seen.
if(NOT first MATCHES "Building CXX" OR built MATCHES "Building CXX")
  message(FATAL_ERROR "expected libddp.a of the objects of libddp.so, got:\n${built}")
endif()

# As a part of another project, ddp builds only the library and ddprun, and installs nothing.
file(GLOB_RECURSE programs "${WORK_DIR}/build/*ddp_bench" "${WORK_DIR}/build/*mnist" "${WORK_DIR}/build/*_test")
if(programs)
  message(FATAL_ERROR "expected no programs but ddprun of a subproject, got ${programs}")
endif()
