# Installs the build in BUILD_DIR below WORK_DIR, then configures, builds and runs CONSUMER_DIR
# with nothing but that prefix. WORK_DIR has a space in its name on purpose.

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message("${output}") # apart from the error, whose text CMake would reflow
    message(FATAL_ERROR "${command}: expected exit status 0, got ${status}; its output is above")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
set(prefix "${WORK_DIR}/prefix")
run(${CMAKE_COMMAND} --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${prefix}")
if(NOT EXISTS "${prefix}/bin/ddprun")
  message(FATAL_ERROR "expected ${prefix}/bin/ddprun, found no such file")
endif()

set(sanitize "")
if(SANITIZE)
  set(sanitize "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
string(REPLACE ";" "\\;" launcher "${LAUNCHER}")
# Unoptimized: the consumer takes one step, and half the test would be its compilation.
run(${CMAKE_COMMAND} -S "${CONSUMER_DIR}" -B "${WORK_DIR}/build" -G "${GENERATOR}"
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
  "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" ${sanitize})
if(output MATCHES "ddp was built with LibTorch")
  message(FATAL_ERROR "expected the LibTorch that ddp was built with:\n${output}")
endif()
run(${CMAKE_COMMAND} --build "${WORK_DIR}/build" --config "${CONFIG}")

run("${WORK_DIR}/build/consumer")
if(NOT output MATCHES "ok\n$")
  message(FATAL_ERROR "consumer: expected 'ok', got:\n${output}")
endif()
