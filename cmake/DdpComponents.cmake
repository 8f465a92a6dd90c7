# ddp_add_component(<name> ROOMS <rooms>... [USES <components>...])
#
# A part of the library that a program can link by itself: ddp::<name>, with the public headers and the objects of
# its rooms. Its rooms may use one another, and the rooms of the components it USES. ddp::ddp is all components
# and <ddp/ddp.h>.
#
# The static library is an archive a component, so that a program builds and links what it uses. libddp.so is one
# library, because it hides what the rooms use of one another; there ddp::<name> is ddp::ddp by another name.
function(ddp_add_component name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ROOMS;USES")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "ddp_add_component(${name}): unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  set(DDP_LIBRARY ddp_${name}) # for ddp_add_room: what takes the objects and the headers
  if(BUILD_SHARED_LIBS)
    set(DDP_LIBRARY ddp)
    add_library(ddp_${name} INTERFACE)
    target_link_libraries(ddp_${name} INTERFACE ddp)
  else()
    ddp_add_library(ddp_${name} STATIC)
    list(TRANSFORM arg_USES PREPEND ddp_ OUTPUT_VARIABLE used)
    target_link_libraries(ddp_${name} PUBLIC ${used})
    target_link_libraries(ddp INTERFACE ddp_${name})
    add_dependencies(ddp ddp_${name})
  endif()
  add_library(ddp::${name} ALIAS ddp_${name})
  set_target_properties(ddp_${name} PROPERTIES EXPORT_NAME ${name})

  set(DDP_ROOMS_SEEN ${arg_ROOMS}) # for ddp_add_room
  foreach(component IN LISTS arg_USES)
    get_property(rooms GLOBAL PROPERTY DDP_ROOMS_SEEN_BY_${component})
    list(APPEND DDP_ROOMS_SEEN ${rooms})
  endforeach()
  set_property(GLOBAL PROPERTY DDP_ROOMS_SEEN_BY_${name} ${DDP_ROOMS_SEEN})
  foreach(room IN LISTS arg_ROOMS)
    add_subdirectory(${room})
  endforeach()
endfunction()

# A library without a source of its own: its objects come from the rooms.
function(ddp_add_library name type)
  add_library(${name} ${type})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_compile_features(${name} PUBLIC cxx_std_17)
  # The target, not ${TORCH_LIBRARIES}: that would put absolute paths into the installed package.
  target_link_libraries(${name} PUBLIC torch Threads::Threads)
  target_include_directories(${name} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endfunction()

find_package(Threads REQUIRED)
if(BUILD_SHARED_LIBS)
  ddp_add_library(ddp SHARED)
  # Before 1.0 another minor version is another interface: libddp.so.0.1.
  set_target_properties(ddp PROPERTIES
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
else()
  add_library(ddp INTERFACE)
  target_sources(ddp PRIVATE ddp/umbrella/include/ddp/ddp.h) # makes it a target to build
endif()
add_library(ddp::ddp ALIAS ddp)

ddp_add_component(core ROOMS comm shard reducer sampler ddp)
ddp_add_component(checkpoint ROOMS data checkpoint USES core)
ddp_add_component(training ROOMS training USES core checkpoint)
ddp_add_component(parallel ROOMS parallel USES core)

# <ddp/ddp.h>, which includes the public headers of all rooms; no room sees it.
target_include_directories(ddp INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/ddp/umbrella/include>)
if(DDP_INSTALL)
  install(DIRECTORY ddp/umbrella/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endif()
