// How a thread treats denormal numbers, set for a scope and put back at its end.
// Included inside an unnamed namespace of each per-ISA translation unit.
//
// Products of far keys' weights underflow. On Intel each operation that reads or writes a denormal takes a microcode assist of
// some 150 cycles, so every thread of the kernel flushes them to zero. The state belongs to a thread: each parallel region sets
// it for each of its threads. Never around a parallel region: threads that start there would inherit the flush for good.

class DenormalMode {
 public:
  explicit DenormalMode(bool flush) : before(read()) { set(flush); }
  ~DenormalMode() { write(before); }
  DenormalMode(const DenormalMode&) = delete;
  DenormalMode& operator=(const DenormalMode&) = delete;

  static bool flushes() { return FLUSH && (read() & FLUSH) == FLUSH; }
  static void set(bool flush) { write(flush ? read() | FLUSH : read() & ~FLUSH); }

 private:
  // The asm statements tell the compiler that memory changes, so that no load, and no arithmetic on it, moves across.
#if defined(__x86_64__)
  typedef uint32_t State;
  static constexpr State FLUSH = 0x8040;  // MXCSR: flush results to zero (bit 15), read denormals as zero (bit 6)
  static State read() {
    State state;
    __asm__ __volatile__("stmxcsr %0" : "=m"(state) : : "memory");
    return state;
  }
  static void write(State state) { __asm__ __volatile__("ldmxcsr %0" : : "m"(state) : "memory"); }
#elif defined(__aarch64__)
  typedef uint64_t State;
  static constexpr State FLUSH = 1 << 24;  // FPCR.FZ: both operands and results
  static State read() {
    State state;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(state) : : "memory");
    return state;
  }
  static void write(State state) { __asm__ __volatile__("msr fpcr, %0" : : "r"(state) : "memory"); }
#else
  typedef uint32_t State;  // not known here: as the caller has it
  static constexpr State FLUSH = 0;
  static State read() { return 0; }
  static void write(State) {}
#endif
  State before;
};
