//! What Linux says about processes.

use std::time::Duration;

/// Peak resident memory of this process in bytes; 0 where there is no `/proc`.
pub(crate) fn peak_memory() -> u64 {
    status("self", "VmHWM:")
}

/// The same of another process.
pub(crate) fn peak_memory_of(pid: u32) -> u64 {
    status(&pid.to_string(), "VmHWM:")
}

/// Its resident memory now.
pub(crate) fn memory_of(pid: u32) -> u64 {
    status(&pid.to_string(), "VmRSS:")
}

/// A line of `/proc/…/status`, in bytes.
fn status(process: &str, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .unwrap_or_default()
        * 1_024
}

/// Processor time used so far by all threads, user and system; in steps of 10 ms. 0 where there is no `/proc`.
pub(crate) fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is the program's name in parentheses; user and system time are the 14th and 15th.
    let ticks = stat.rsplit_once(')').map_or(0, |(_, fields)| {
        let times = fields.split_whitespace().skip(11).take(2);
        times.filter_map(|t| t.parse::<u64>().ok()).sum()
    });
    Duration::from_millis(ticks * 10)
}

/// Load of the last minute, and the number of processors.
pub(crate) fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown").to_owned();
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    format!("load {load} on {processors} processors")
}
