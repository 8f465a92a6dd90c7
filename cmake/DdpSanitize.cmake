# DDP_SANITIZE=address,undefined or thread: instruments everything of this project (LibTorch
# itself is prebuilt and is not), and DDP_TEST_ENVIRONMENT holds what the test runs then need.
# Threads of OpenMP would spin on the cores that other tests need.
set(DDP_TEST_ENVIRONMENT OMP_WAIT_POLICY=passive)
if(DDP_SANITIZE)
  # -g1 names files and lines in reports; full debug information makes files that include
  # torch/torch.h compile several times slower, and -O1 keeps the instrumented code usable.
  add_compile_options(-fsanitize=${DDP_SANITIZE} -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=${DDP_SANITIZE})
  # GCC loses track of values in instrumented code, and says so of its own std::optional.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
endif()

if(DDP_SANITIZE MATCHES "undefined")
  add_compile_options(-fno-sanitize-recover=undefined)
  list(APPEND DDP_TEST_ENVIRONMENT UBSAN_OPTIONS=print_stacktrace=1)
endif()
if(DDP_SANITIZE MATCHES "address")
  list(APPEND DDP_TEST_ENVIRONMENT
    "LSAN_OPTIONS=suppressions='${CMAKE_CURRENT_LIST_DIR}/lsan.supp':print_suppressions=0")
endif()
if(DDP_SANITIZE MATCHES "thread")
  # Fences order plain reads of other processes' memory, which the sanitizer does not see.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  # LibTorch counts references in code that is not instrumented: what it frees looks like a race.
  list(APPEND DDP_TEST_ENVIRONMENT
    "TSAN_OPTIONS=suppressions='${CMAKE_CURRENT_LIST_DIR}/tsan.supp' history_size=4 ignore_noninstrumented_modules=1")
endif()

# For processes that fork: the child ends without the threads whose memory it has a copy of, and
# all of that counts as leaked.
set(DDP_FORK_TEST_ENVIRONMENT ${DDP_TEST_ENVIRONMENT})
if(DDP_SANITIZE MATCHES "address")
  list(APPEND DDP_FORK_TEST_ENVIRONMENT ASAN_OPTIONS=detect_leaks=0)
endif()
