// Streams and events as vector clocks.  A use of memory that is not ordered behind the last one is a
// race, however seldom a real device would lose it.
//
// A clock says of each stream how much of it is known to be over.  A stream ticks with every op; an
// event is a copy of its stream's clock; who waits for it takes the later of both, place by place.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace rehearsal {

using Stream = int64_t;  // device << 32 | number on it; number 0 is the default stream
constexpr Stream HOST = -1, NOBODY = -2;
constexpr int MOST_DEVICES = 16;
constexpr size_t MOST_RACES = 100;  // that are told

using Clock = std::map<Stream, int64_t>;

inline Stream stream_on(int64_t device, int64_t number) { return device << 32 | number; }
inline int64_t number_of(Stream stream) { return stream & 0xFFFFFFFF; }

struct Use {
  Stream stream = NOBODY;
  int64_t tick = 0;
  std::string op;
};

// The last uses of a piece of memory.
struct Uses {
  Use write;
  std::map<Stream, Use> reads;  // since the write
};

inline std::recursive_mutex guard;  // of all that is below
inline std::map<Stream, Clock> clocks;
inline std::map<int64_t, Clock> events;
inline std::vector<std::string> races;
inline int64_t newest_stream = 0, newest_event = 0, host_syncs = 0;

inline void merge(Clock& into, const Clock& from) {
  for (auto& [stream, tick] : from)
    if (into[stream] < tick) into[stream] = tick;
}

inline int64_t tick(Stream stream) { return ++clocks[stream][stream]; }

inline bool is_behind(Stream stream, const Use& use) {
  return use.stream == NOBODY || use.stream == stream || clocks[stream][use.stream] >= use.tick;
}

inline std::string named(Stream stream) {
  return "stream " + std::to_string(stream >> 32) + "." + std::to_string(number_of(stream));
}

inline void tell_race(const std::string& text) {
  if (races.size() < MOST_RACES) races.push_back(text);
}

inline void note_use(Uses& uses, const Use& now, bool writes) {
  auto against = [&](const Use& before, const char* did) {
    if (!is_behind(now.stream, before))
      tell_race(now.op + " on " + named(now.stream) + (writes ? " writes" : " reads") + " what " +
                before.op + did + named(before.stream));
  };
  against(uses.write, " writes on ");
  if (!writes) {
    uses.reads[now.stream] = now;
    return;
  }
  for (auto& [stream, read] : uses.reads) against(read, " reads on ");
  uses.reads.clear();
  uses.write = now;
}

inline Stream new_stream(int64_t device) {
  std::lock_guard held(guard);
  auto stream = stream_on(device, ++newest_stream);
  clocks[stream] = clocks[HOST];  // what the host has seen end is over for all that it queues
  return stream;
}

inline int64_t new_event() {
  std::lock_guard held(guard);
  return ++newest_event;
}

inline void record(int64_t event, Stream stream) {
  std::lock_guard held(guard);
  tick(stream);
  events[event] = clocks[stream];
}

inline void wait_for(int64_t event, Stream stream) {
  std::lock_guard held(guard);
  merge(clocks[stream], events[event]);
}

// The host waits: what is queued from now on comes after all of `seen`.
inline void host_waits(const Clock& seen) {
  std::lock_guard held(guard);
  ++host_syncs;
  merge(clocks[HOST], seen);
  auto known = clocks[HOST];
  for (auto& [stream, clock] : clocks) merge(clock, known);
}

inline void host_waits_for_event(int64_t event) {
  std::lock_guard held(guard);
  host_waits(Clock(events[event]));
}

inline void host_waits_for_stream(Stream stream) {
  std::lock_guard held(guard);
  host_waits(Clock(clocks[stream]));
}

inline void host_waits_for_device(int64_t device) {
  std::lock_guard held(guard);
  Clock all;
  for (auto& [stream, clock] : clocks)
    if (stream >= 0 && stream >> 32 == device) merge(all, clock);
  host_waits(all);
}

}  // namespace rehearsal
