# The internal and private headers of all rooms, for tests.
add_library(ddp_internal INTERFACE)

# Compiles all rooms and links nothing; for scripts/aarch64.sh.
add_custom_target(ddp_rooms)

# ddp_add_room(<name> SOURCES <files>... [USES <rooms>...])
#
# One room of the component that is being added (DdpComponents.cmake), called in <name>/CMakeLists.txt: the OBJECT
# library ddp_room_<name>. It sees the public headers of the rooms it USES and of no other, so an arrow the wrong way
# does not compile. Its own public headers are <name>/include/ddp/*.h, included as <ddp/x.h>; it may have none.
#
# A room may have <name>/internal/ddp/internal/*.h beside them, included as <ddp/internal/x.h>: for
# the rooms that use it and not for users, so neither installed nor seen through ddp::ddp. Its private
# headers it includes from its own folder: "buckets/bucket.h". Tests link ddp_internal, which has both.
function(ddp_add_room name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;USES")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "ddp_add_room(${name}): unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  foreach(used IN LISTS arg_USES)
    if(NOT used IN_LIST DDP_ROOMS_SEEN)
      message(FATAL_ERROR "ddp_add_room(${name}): expected rooms of its component, or of those that this one USES "
        "(cmake/DdpComponents.cmake), got ${used}")
    endif()
  endforeach()
  set(room ddp_room_${name})
  set(room_dir ${PROJECT_SOURCE_DIR}/${name})

  add_library(${room} OBJECT ${arg_SOURCES})
  set_target_properties(${room} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${room} PUBLIC cxx_std_17)
  if(EXISTS ${room_dir}/include)
    target_include_directories(${room} PUBLIC ${room_dir}/include)
    target_include_directories(${DDP_LIBRARY} INTERFACE $<BUILD_INTERFACE:${room_dir}/include>)
    if(DDP_INSTALL)
      install(DIRECTORY ${room_dir}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
    endif()
  endif()
  target_include_directories(${room} PRIVATE ${room_dir})
  target_include_directories(ddp_internal INTERFACE ${room_dir})
  if(EXISTS ${room_dir}/internal)
    add_library(ddp_${name}_internal INTERFACE)
    target_include_directories(ddp_${name}_internal INTERFACE ${room_dir}/internal)
    target_link_libraries(${room} PUBLIC ddp_${name}_internal)
    target_link_libraries(ddp_internal INTERFACE ddp_${name}_internal)
  endif()
  list(TRANSFORM arg_USES PREPEND ddp_room_)
  target_link_libraries(${room} PUBLIC torch ${arg_USES} PRIVATE $<BUILD_INTERFACE:ddp_warnings>)
  ddp_use_pch(${room} C10D)

  target_sources(${DDP_LIBRARY} PRIVATE $<TARGET_OBJECTS:${room}>)
  add_dependencies(ddp_rooms ${room})
endfunction()
