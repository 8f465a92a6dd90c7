# Test programs. Each is one CTest entry: starting a program that loads LibTorch costs up to
# 0.35 s, so an entry per case would cost more than the cases.
find_package(Catch2 QUIET)
if(NOT Catch2_FOUND)
  message(FATAL_ERROR "Catch2 was not found, which the tests need. scripts/setup.sh or apt-get install catch2 "
    "installs it; -DDDP_BUILD_TESTS=OFF does without.")
endif()

# ddp_add_world(<name> <source> [MORE <sources>...] [LIBS <targets>...]): a program without Catch2 that tests start as several
# ranks, as ${DDP_WORLDS}/<name>. All worlds are one program (tests/worlds), for each that includes LibTorch's
# headers takes 5 to 15 s to compile, and <name> is a link to it. The source defines `int main(int argc,
# char** argv)` in namespace <name>, as it does all its names, and has no static objects that do something
# in another world.
set(DDP_WORLDS ${PROJECT_BINARY_DIR}/bin)
function(ddp_add_world name source)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "MORE;LIBS")
  set_property(GLOBAL APPEND PROPERTY DDP_WORLDS ${name})
  list(TRANSFORM arg_MORE PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  set_property(
    GLOBAL APPEND PROPERTY DDP_WORLD_SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${source} ${arg_MORE})
  set_property(GLOBAL APPEND PROPERTY DDP_WORLD_LIBS ${arg_LIBS})
  add_custom_command(OUTPUT ${DDP_WORLDS}/${name}
    COMMAND ${CMAKE_COMMAND} -E create_symlink test_worlds ${DDP_WORLDS}/${name}
    DEPENDS test_worlds COMMENT "Linking to test_worlds: ${name}" VERBATIM)
  add_custom_target(${name} ALL DEPENDS ${DDP_WORLDS}/${name})
endfunction()

# ddp_add_test(<name> SOURCES <files>... [LIBS <targets>...] [LABELS <labels>...]
#              [TIMEOUT <seconds>] [COST <seconds>] [PROCESSORS <n>] [PCH <C10D or TORCH>])
#
# A program of Catch2 cases that may use the library, every room's private headers (included from
# the repository's root: "reducer/buckets/bucket.h") and tests/support.
# LABELS: pure, ranks, process, cuda, errors, slow. A program labelled cuda holds GPU cases only:
# when it prints 'skipped: no CUDA device', CTest counts it as skipped.
# COST: about how long it takes, in seconds; CTest starts with the longest. Default: 1
# PROCESSORS: quarter cores, of which test.sh gives CTest four a core, because ranks wait most of the time, for
# each other and for timeouts. 1 for tests that wait; 2 for those that compute for half of their time; 3 for those
# that keep a core busy, and 5 for two cores: beside them, others wait. Default: 1
# PCH: C10D where no source includes torch/torch.h; see DdpPch.cmake. Default: TORCH.
function(ddp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PCH" "")
  if(NOT arg_PCH)
    set(arg_PCH TORCH)
  endif()
  ddp_add_plain_test(${name} ${arg_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ddp::ddp ddp_internal ddp_test_support)
  ddp_use_pch(${name} ${arg_PCH})
endfunction()

# Runs cases of <test> once more, as <name>, with a variable in the environment. Fails where there are none.
function(ddp_add_run name test cases variable)
  cmake_parse_arguments(PARSE_ARGV 4 arg "" "COST;PROCESSORS" "")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "test ${name}: unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  get_test_property(${test} LABELS labels)
  get_test_property(${test} TIMEOUT timeout)
  ddp_default_test_arguments()
  add_test(NAME ${name} COMMAND ${test} --warn NoTests "${cases}")
  set_tests_properties(${name} PROPERTIES
    LABELS "${labels}" TIMEOUT ${timeout} COST ${arg_COST} PROCESSORS ${arg_PROCESSORS}
    ENVIRONMENT "${variable};${DDP_TEST_ENVIRONMENT}")
endfunction()

# ddp_also_over(<backend> <test> [<cases>] [COST <seconds>] [PROCESSORS <n>]): runs the cases of <test>,
# whose ranks are threads, over that backend (of tests/support/ranks.h) too; by default all that are not
# about Gloo. Not those tagged [once] or [pure], which make no ranks, or over a backend of their own.
function(ddp_also_over backend test)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "COST;PROCESSORS" "")
  list(POP_FRONT arg_UNPARSED_ARGUMENTS cases)
  if(NOT cases)
    set(cases "~[gloo]")
  endif()
  string(REPLACE "," "~[once]~[pure]," cases "${cases}~[once]~[pure]")
  ddp_default_test_arguments()
  ddp_add_run(${test}_over_${backend} ${test} "${cases}" DDP_TEST_BACKEND=${backend}
    COST ${arg_COST} PROCESSORS ${arg_PROCESSORS} ${arg_UNPARSED_ARGUMENTS})
endfunction()

# ddp_also_in_locale(<test> <cases> [COST <seconds>] [PROCESSORS <n>]): runs them as a program, too, that
# writes numbers for its users (tests/support/foreign_locale.h).
function(ddp_also_in_locale test cases)
  ddp_add_run(${test}_in_locale ${test} "${cases}" DDP_TEST_LOCALE=all ${ARGN})
endfunction()

# What a test says of itself where it says nothing; see ddp_add_test.
macro(ddp_default_test_arguments)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_COST)
    set(arg_COST 1)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
endmacro()

# ddp_add_plain_test(...): the same for what needs no LibTorch, so neither starts nor links it.
function(ddp_add_plain_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;COST;PROCESSORS" "SOURCES;LIBS;LABELS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "test ${name}: unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  ddp_default_test_arguments()

  add_executable(${name} ${arg_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_17)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${arg_LIBS} Catch2::Catch2WithMain ddp_warnings)
  ddp_compile_fast(${name})

  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} COST ${arg_COST} PROCESSORS ${arg_PROCESSORS}
    ENVIRONMENT "${DDP_TEST_ENVIRONMENT}")
  if("cuda" IN_LIST arg_LABELS)
    set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: no CUDA device")
  endif()
endfunction()

# ddp_add_python_test(<name> <script> <arguments>... [TIMEOUT <seconds>] [COST <seconds>]
#                     [PROCESSORS <n>]): a Python script that compares a program of ours with the
# torch that is installed; skipped where none is. An argument {} is an empty folder.
function(ddp_add_python_test name script)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT;COST;PROCESSORS" "")
  ddp_default_test_arguments()
  add_test(NAME ${name}
    COMMAND ${PROJECT_SOURCE_DIR}/tests/support/beside_python.sh ${PROJECT_SOURCE_DIR}
      ${CMAKE_CURRENT_SOURCE_DIR}/${script} ${arg_UNPARSED_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES
    LABELS process TIMEOUT ${arg_TIMEOUT} COST ${arg_COST} PROCESSORS ${arg_PROCESSORS}
    SKIP_REGULAR_EXPRESSION "skipped: no Python has torch"
    ENVIRONMENT "${DDP_TEST_ENVIRONMENT}")
endfunction()
