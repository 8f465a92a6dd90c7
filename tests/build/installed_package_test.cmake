# Installs the build in BUILD_DIR below WORK_DIR, then configures, builds and runs CONSUMER_DIR
# with nothing but that prefix and the LibTorch in TORCH_DIR, and builds the installed examples.
# WORK_DIR has a space in its name on purpose.

function(try)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  list(JOIN ARGV " " command)
  set(status "${status}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
  set(command "${command}" PARENT_SCOPE)
endfunction()

function(run)
  try(${ARGV})
  if(NOT status EQUAL 0)
    message("${output}") # apart from the error, whose text CMake would reflow
    message(FATAL_ERROR "${command}: expected exit status 0, got ${status}; its output is above")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# A user who has never run setup.sh, and whose environment names no LibTorch.
set(as_newcomer ${CMAKE_COMMAND} -E env "HOME=${WORK_DIR}" --unset=XDG_CACHE_HOME
  --unset=Torch_DIR --unset=Torch_ROOT --unset=CMAKE_PREFIX_PATH)
set(sanitize "")
if(SANITIZE)
  set(sanitize "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} "${LAUNCHER}") # a list, which an argument would take apart
# Unoptimized: the programs take a few steps, and half the test would be their compilation.
set(settings -G "${GENERATOR}" "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"
  "-DCMAKE_CXX_COMPILER=${CXX}" ${sanitize})

file(REMOVE_RECURSE "${WORK_DIR}")
set(prefix "${WORK_DIR}/prefix")
run(${CMAKE_COMMAND} --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${prefix}")

# Nothing of the machine that built it: its folders, or where its LibTorch lies. Debug information
# and what LibTorch's headers compile to name folders, so of binaries only optimized ones are
# searched, and only for ddp's.
get_filename_component(torch_prefix "${TORCH_DIR}/../../.." ABSOLUTE)
function(expect_nowhere kind)
  foreach(folder IN LISTS ARGN)
    string(REGEX REPLACE "([][+.*()^$?|{}\\])" "\\\\\\1" escaped "${folder}")
    # Where a path begins: a clone in /ddp is not what include/ddp names.
    try(grep -r --files-with-matches ${kind} -E "(^|[^[:alnum:]_.}/-])${escaped}(/|[^[:alnum:]_.-]|$)" "${prefix}")
    if(NOT status EQUAL 1)
      message(FATAL_ERROR "expected no installed file to name ${folder}, got:\n${output}")
    endif()
  endforeach()
endfunction()
set(ENV{LC_ALL} C)
expect_nowhere(--binary-files=without-match "${BUILD_DIR}" "${SOURCE_DIR}" "${torch_prefix}")
if(CONFIG STREQUAL "Release")
  expect_nowhere(--binary-files=text "${BUILD_DIR}" "${SOURCE_DIR}")
endif()
file(GLOB binaries "${prefix}/bin/*" "${prefix}/lib*/*.so")
foreach(binary IN LISTS binaries)
  run(readelf -d "${binary}")
  if(output MATCHES "R(UN)?PATH")
    message(FATAL_ERROR "${binary}: expected no RPATH, got:\n${output}")
  endif()
endforeach()

# Without a LibTorch the package says which one it needs.
try(${as_newcomer} ${CMAKE_COMMAND} -S "${CONSUMER_DIR}" -B "${WORK_DIR}/no torch" ${settings}
  "-DCMAKE_PREFIX_PATH=${prefix}")
string(REGEX REPLACE "[ \n]+" " " words "${output}")
if(status EQUAL 0 OR NOT words MATCHES
    "LibTorch was not found\\. This ddp was built with LibTorch 2\\.[0-9.]+.* -DCMAKE_PREFIX_PATH=")
  message(FATAL_ERROR "expected the package to ask for a LibTorch of its version, got ${status}:\n${output}")
endif()

run(${as_newcomer} "CMAKE_PREFIX_PATH=${prefix}:${torch_prefix}"
  ${CMAKE_COMMAND} -S "${CONSUMER_DIR}" -B "${WORK_DIR}/build" ${settings})
if(output MATCHES "ddp was built with LibTorch")
  message(FATAL_ERROR "expected the LibTorch that ddp was built with:\n${output}")
endif()
run(${CMAKE_COMMAND} --build "${WORK_DIR}/build" --config "${CONFIG}")

run("${WORK_DIR}/build/consumer")
if(NOT output MATCHES "ok on 1 rank")
  message(FATAL_ERROR "consumer: expected 'ok on 1 rank', got:\n${output}")
endif()
run(${CMAKE_CTEST_COMMAND} --test-dir "${WORK_DIR}/build" --output-on-failure)
if(NOT output MATCHES "tests passed, 0 tests failed out of 1")
  message(FATAL_ERROR "expected add_test with ddp::ddprun to pass, got:\n${output}")
endif()

run(${as_newcomer} ${CMAKE_COMMAND} -S "${prefix}/share/ddp/examples" -B "${WORK_DIR}/examples"
  ${settings} "-Dddp_ROOT=${prefix}" "-DTorch_DIR=${TORCH_DIR}")
run(${CMAKE_COMMAND} --build "${WORK_DIR}/examples" --config "${CONFIG}" --target minimal)
run("${prefix}/bin/ddprun" -n 2 "${WORK_DIR}/examples/bin/minimal")
if(NOT output MATCHES "y = ")
  message(FATAL_ERROR "minimal: expected a line, got:\n${output}")
endif()
if(NOT EXISTS "${prefix}/share/ddp/README.md" OR NOT EXISTS "${prefix}/share/ddp/examples/README.md")
  message(FATAL_ERROR "expected README.md in share/ddp and in share/ddp/examples")
endif()
