// Streams and events as vector clocks.  A use of memory that is not ordered behind the last one is a
// race, however seldom a real device would lose it.
//
// A clock says of each stream how much of it is known to be over.  A stream ticks with every op; an
// event is a copy of its stream's clock; who waits for it takes the later of both, place by place.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
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

// What the end of a process does not destroy: threads of communicators may still wait, and then the
// end would wait for them; tensors may be given back later still.
template <typename T>
inline T& lasting() {
  return *new T;
}

inline auto& guard = lasting<std::recursive_mutex>();  // of all that is below
inline auto& clocks = lasting<std::map<Stream, Clock>>();
inline auto& events = lasting<std::map<int64_t, Clock>>();
inline auto& races = lasting<std::vector<std::string>>();
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

// ---- work of communicators: threads do it, in their own time ----------------------------------------
//
// A stream that waits for it is behind it at once, by its clock; the host waits only where an op, which
// runs as it is queued, is queued behind it.

using Works = std::set<int64_t>;

inline auto& work_ended = lasting<std::condition_variable_any>();
inline auto& under_way = lasting<Works>();
inline auto& failed = lasting<std::map<int64_t, std::string>>();
inline auto& awaited = lasting<std::map<Stream, Works>>();
inline auto& awaited_by_event = lasting<std::map<int64_t, Works>>();
inline auto& awaited_by_work = lasting<std::map<int64_t, Works>>();
inline auto& sum_streams = lasting<std::set<Stream>>();  // of communicators that sum and gather
inline int64_t ops_beside_sums = 0;
constexpr auto LIMIT = std::chrono::seconds(60);

// Not to be called by who holds the guard.
inline void settle(Works works) {
  std::unique_lock held(guard);
  auto is_over = [&] {
    for (auto work : works)
      if (under_way.count(work)) return false;
    return true;
  };
  if (!work_ended.wait_for(held, LIMIT, is_over))
    throw std::runtime_error("rehearsal NCCL: no end for 60 s: a deadlock");
  for (auto work : works)
    if (failed.count(work)) throw std::runtime_error(failed[work]);
}

inline void settle_stream(Stream stream) {
  Works works;
  {
    std::lock_guard held(guard);
    works.swap(awaited[stream]);
  }
  if (!works.empty()) settle(works);
}

// As `settle_stream`; what has failed is told by the next op, or nowhere.
inline bool settle_quietly(Stream stream) {
  try {
    settle_stream(stream);
  } catch (std::runtime_error&) {
    return false;
  }
  return true;
}

inline void count_beside(Stream stream) {
  for (auto other : sum_streams)
    if (other >> 32 == stream >> 32 && clocks[stream][other] < clocks[other][other]) {
      ++ops_beside_sums;
      return;
    }
}

inline void record(int64_t event, Stream stream) {
  std::lock_guard held(guard);
  tick(stream);
  events[event] = clocks[stream];
  awaited_by_event[event] = awaited[stream];
}

inline void wait_for(int64_t event, Stream stream) {
  std::lock_guard held(guard);
  merge(clocks[stream], events[event]);
  auto& works = awaited_by_event[event];
  awaited[stream].insert(works.begin(), works.end());
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
  {
    std::lock_guard held(guard);
    auto& works = awaited_by_event[event];
    awaited[HOST].insert(works.begin(), works.end());
  }
  settle_quietly(HOST);
  std::lock_guard held(guard);
  host_waits(Clock(events[event]));
}

inline void host_waits_for_stream(Stream stream) {
  settle_quietly(stream);
  std::lock_guard held(guard);
  host_waits(Clock(clocks[stream]));
}

inline void host_waits_for_device(int64_t device) {
  std::vector<Stream> streams;
  {
    std::lock_guard held(guard);
    for (auto& [stream, clock] : clocks)
      if (stream >= 0 && stream >> 32 == device) streams.push_back(stream);
  }
  for (auto stream : streams) settle_quietly(stream);
  std::lock_guard held(guard);
  Clock all;
  for (auto& [stream, clock] : clocks)
    if (stream >= 0 && stream >> 32 == device) merge(all, clock);
  host_waits(all);
}

}  // namespace rehearsal
