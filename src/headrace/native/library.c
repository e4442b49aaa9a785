/* What library.py asks a library before it uses it. */
#ifndef HEADRACE_SOURCE_HASH
#define HEADRACE_SOURCE_HASH ""
#endif

const char *hr_source_hash(void) { return HEADRACE_SOURCE_HASH; }

/* Say whether this processor has the instructions of the faster variant (setup.py names them to the compiler). */
int hr_runs_avx2(void) {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
  return 0;
#endif
}
