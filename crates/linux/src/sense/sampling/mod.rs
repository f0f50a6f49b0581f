//! Sampled data accesses of programs: Intel's PEBS load latency and AMD's instruction-based sampling (IBS).
//!
//! Problem: data sharing between programs, and the frequency of their accesses, are visible in addresses only, and only
//! hardware can sample these without slowing a program down. Method: the kernel describes both facilities in sysfs
//! ([`find_facility`] reads their encodings there, so that a new model needs no new table); one event per thread, or
//! per CPU if the kernel allows nothing else, writes samples into a ring ([`records`]) that is emptied a few times a
//! second. Properties: no thread is stopped or moved; samples of other programs, of the kernel, and without an address
//! are left out and counted; if the host has neither facility, [`find_facility`] reports this.

pub mod records;
pub(crate) mod ring;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use cachemate_core::CpuId;
use perf_event_open_sys as perf;

use crate::kernel::Kernel;
use crate::sense::events::open_event;
use records::{FIELDS, RingContents, parse_samples};
use ring::SampleRing;

const DEVICES_DIR: &str = "/sys/bus/event_source/devices";
/// Size of a ring, which holds about two thousand samples of 56 bytes.
const RING_BYTES: usize = 128 << 10;
/// Minimum latency of a sampled load; faster loads hit the L1 and are of little interest.
const MIN_LOAD_LATENCY_CYCLES: u64 = 3;
/// IBS counts in steps of sixteen, and at least nine steps.
const IBS_STEP: u64 = 16;
const MIN_IBS_PERIOD: u64 = 0x90;

/// A facility of this host that samples accesses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facility {
    /// Vendor and facility, for display.
    pub name: &'static str,
    kind: u32,
    config: Config,
    /// Leader of the group: since Sapphire Rapids, the load-latency event works only together with an auxiliary event.
    leader: Option<Config>,
    /// Allowed skid: 0 = any, 2 = none, which makes an Intel event a PEBS event.
    precise_ip: u64,
    /// Whether the facility samples the kernel as well, because it cannot exclude it.
    samples_kernel: bool,
    period_step: u64,
    min_period: u64,
}

/// The three configuration words of perf_event_open(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Config([u64; 3]);

/// Finds the facility of this host that samples data addresses.
///
/// # Errors
/// There is none, or the kernel's description is not understood; the error names the file.
pub fn find_facility(kernel: &dyn Kernel) -> Result<Facility, String> {
    if let Some(kind) = device_type(kernel, "ibs_op")? {
        let mut config = Config::default();
        // Count operations instead of cycles, so that a sample stands for a number of operations. The first IBS lacks
        // this option.
        config.set_if_present(kernel, "ibs_op", "cnt_ctl", 1)?;
        return Ok(Facility {
            name: "AMD IBS",
            kind,
            config,
            leader: None,
            precise_ip: 0,
            samples_kernel: true,
            period_step: IBS_STEP,
            min_period: MIN_IBS_PERIOD,
        });
    }
    for device in ["cpu", "cpu_core"] {
        let Some(kind) = device_type(kernel, device)? else {
            continue;
        };
        let read_event_terms = |name: &str| {
            kernel
                .read(
                    &Path::new(DEVICES_DIR)
                        .join(device)
                        .join("events")
                        .join(name),
                )
                .ok()
        };
        let Some(terms) = read_event_terms("mem-loads") else {
            continue;
        };
        let mut config = encode(kernel, device, &terms)?;
        config.set_if_present(kernel, device, "ldlat", MIN_LOAD_LATENCY_CYCLES)?;
        let leader = read_event_terms("mem-loads-aux")
            .map(|terms| encode(kernel, device, &terms))
            .transpose()?;
        return Ok(Facility {
            name: "Intel PEBS load latency",
            kind,
            config,
            leader,
            precise_ip: 2,
            samples_kernel: false,
            period_step: 1,
            min_period: 1_000,
        });
    }
    Err("neither AMD IBS nor Intel PEBS load latency is offered".to_string())
}

fn device_type(kernel: &dyn Kernel, device: &str) -> Result<Option<u32>, String> {
    let path = Path::new(DEVICES_DIR).join(device).join("type");
    let Ok(text) = kernel.read(&path) else {
        return Ok(None);
    };
    let parse_result = text.trim().parse().map(Some);
    parse_result.map_err(|_| {
        format!(
            "{}: found '{}', expected a number",
            path.display(),
            text.trim()
        )
    })
}

/// Encodes terms such as `event=0xcd,umask=0x1,ldlat=3` by the device's formats.
fn encode(kernel: &dyn Kernel, device: &str, terms: &str) -> Result<Config, String> {
    let mut config = Config::default();
    for term in terms.trim().split(',').filter(|term| !term.is_empty()) {
        let (name, value) = term.split_once('=').unwrap_or((term, "1"));
        let digits = value.trim().strip_prefix("0x");
        let value = digits.map_or_else(
            || value.trim().parse(),
            |digits| u64::from_str_radix(digits, 16),
        );
        let value =
            value.map_err(|_| format!("{device}: found '{term}', expected a name and a number"))?;
        if !config.set_if_present(kernel, device, name, value)? {
            return Err(format!(
                "{DEVICES_DIR}/{device}/format/{name}: not there, expected by the event '{}'",
                terms.trim()
            ));
        }
    }
    Ok(config)
}

impl Config {
    /// Writes a value into the bits that `format/NAME` names (`config1:0-15`); returns false if the device has no such
    /// field.
    fn set_if_present(
        &mut self,
        kernel: &dyn Kernel,
        device: &str,
        name: &str,
        value: u64,
    ) -> Result<bool, String> {
        let path: PathBuf = Path::new(DEVICES_DIR)
            .join(device)
            .join("format")
            .join(name);
        let Ok(format) = kernel.read(&path) else {
            return Ok(false);
        };
        let format = format.trim();
        let format_error = || {
            format!(
                "{}: found '{format}', expected a place such as config1:0-15",
                path.display()
            )
        };
        let (word_name, bit_ranges) = format.split_once(':').ok_or_else(format_error)?;
        let word_index = ["config", "config1", "config2"]
            .iter()
            .position(|known| *known == word_name)
            .ok_or_else(format_error)?;
        let mut remaining_bits = value;
        for bit_range in bit_ranges.split(',') {
            let (low, high) = bit_range.split_once('-').unwrap_or((bit_range, bit_range));
            let (low, high): (u32, u32) = low
                .parse()
                .ok()
                .zip(high.parse().ok())
                .ok_or_else(format_error)?;
            if high < low || high > 63 {
                return Err(format_error());
            }
            let width = high - low + 1;
            let mask = if width == 64 {
                u64::MAX
            } else {
                (1 << width) - 1
            };
            self.0[word_index] =
                self.0[word_index] & !(mask << low) | (remaining_bits & mask) << low;
            remaining_bits = if width == 64 {
                0
            } else {
                remaining_bits >> width
            };
        }
        Ok(true)
    }
}

/// The threads whose accesses an event samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SamplingTarget {
    /// One thread; 0 stands for the calling thread.
    Thread(i32),
    /// All threads on that CPU.
    Cpu(CpuId),
}

impl Facility {
    /// The largest accepted period that is not above `requested_period`; at least the minimum period.
    pub fn accepted_period(&self, requested_period: u64) -> u64 {
        (requested_period.max(self.min_period) / self.period_step).max(1) * self.period_step
    }

    /// Tests the facility on this thread.
    ///
    /// # Errors
    /// The kernel does not open the event, neither for a thread nor for a CPU.
    pub fn check_usable(&self) -> io::Result<()> {
        let period = self.accepted_period(100_000);
        PerfSampler::open(self, SamplingTarget::Thread(0), period)
            .or_else(|_| PerfSampler::open(self, SamplingTarget::Cpu(CpuId(0)), period))?;
        Ok(())
    }
}

/// One running event with its ring.
pub struct PerfSampler {
    /// Kept open, because closing it ends the group.
    _leader: Option<File>,
    file: File,
    ring: SampleRing,
}

impl PerfSampler {
    /// Starts to sample one event in `period`.
    ///
    /// # Errors
    /// The kernel's error: `EINVAL` if the facility samples whole CPUs only, `EACCES` without the required right.
    pub fn open(facility: &Facility, target: SamplingTarget, period: u64) -> io::Result<Self> {
        let leader = facility
            .leader
            .map(|config| open_sampling_event(facility, config, None, target, None))
            .transpose()?;
        let group_fd = leader.as_ref().map(AsRawFd::as_raw_fd);
        let file = open_sampling_event(facility, facility.config, Some(period), target, group_fd)?;
        let ring = SampleRing::map(&file, RING_BYTES)?;
        Ok(PerfSampler {
            _leader: leader,
            file,
            ring,
        })
    }

    /// Adds the records since the last call to `contents`.
    pub fn drain(&mut self, contents: &mut RingContents) {
        parse_samples(&self.ring.take_bytes(), contents);
    }

    /// Stops sampling; samples in the ring remain.
    pub fn stop(&self) {
        // SAFETY: the call takes no argument of ours. A failure does no harm, because an event that no longer exists
        // takes no samples either.
        unsafe { perf::ioctls::DISABLE(self.file.as_raw_fd(), 0) };
    }
}

/// Opens one event; without a `period` it only counts (a group's leader).
fn open_sampling_event(
    facility: &Facility,
    config: Config,
    period: Option<u64>,
    target: SamplingTarget,
    group_fd: Option<i32>,
) -> io::Result<File> {
    let mut attr = perf::bindings::perf_event_attr::default();
    attr.type_ = facility.kind;
    attr.config = config.0[0];
    attr.__bindgen_anon_3.config1 = config.0[1];
    attr.__bindgen_anon_4.config2 = config.0[2];
    if let Some(period) = period {
        attr.__bindgen_anon_1.sample_period = period;
        attr.sample_type = FIELDS;
        attr.set_precise_ip(facility.precise_ip);
    }
    attr.clockid = libc::CLOCK_MONOTONIC;
    attr.set_use_clockid(1);
    attr.set_exclude_kernel(u64::from(!facility.samples_kernel));
    attr.set_exclude_hv(u64::from(!facility.samples_kernel));
    let (pid, cpu) = match target {
        SamplingTarget::Thread(tid) => (tid, -1),
        SamplingTarget::Cpu(cpu) => (-1, cpu.0 as i32),
    };
    open_event(attr, (pid, cpu), group_fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use cachemate_core::DataSource;

    fn device(host: &FakeHost, name: &str, files: &[(&str, &str)]) {
        files
            .iter()
            .for_each(|(file, text)| host.set_file(&format!("{DEVICES_DIR}/{name}/{file}"), text));
    }

    const INTEL_FORMATS: &[(&str, &str)] = &[
        ("type", "4\n"),
        ("format/event", "config:0-7\n"),
        ("format/umask", "config:8-15\n"),
        ("format/ldlat", "config1:0-15\n"),
    ];

    /// Is each vendor's facility found as its sysfs describes it, including an auxiliary leader, and its absence
    /// reported?
    #[test]
    fn facilities_are_read_from_sysfs() {
        let host = FakeHost::default();
        assert!(find_facility(&host).unwrap_err().contains("neither"));
        device(&host, "cpu", INTEL_FORMATS);
        assert!(find_facility(&host).is_err(), "a PMU without the event");
        device(
            &host,
            "cpu",
            &[("events/mem-loads", "event=0xcd,umask=0x1,ldlat=3\n")],
        );
        let skylake = find_facility(&host).unwrap();
        assert_eq!(
            (skylake.kind, skylake.config, skylake.leader),
            (4, Config([0x1cd, 3, 0]), None)
        );
        assert_eq!((skylake.precise_ip, skylake.samples_kernel), (2, false));
        device(
            &host,
            "cpu",
            &[("events/mem-loads-aux", "event=0x03,umask=0x82\n")],
        );
        assert_eq!(
            find_facility(&host).unwrap().leader,
            Some(Config([0x8203, 0, 0])),
            "Sapphire Rapids"
        );
        device(
            &host,
            "ibs_op",
            &[("type", "11\n"), ("format/cnt_ctl", "config:19\n")],
        );
        let zen = find_facility(&host).unwrap();
        assert_eq!(
            (zen.name, zen.kind, zen.config.0[0]),
            ("AMD IBS", 11, 1 << 19)
        );
        assert_eq!(
            (zen.accepted_period(1_000), zen.accepted_period(3)),
            (992, 0x90)
        );
    }

    /// Is a description that is not understood an error with its file, never a wrong event?
    #[test]
    fn descriptions_that_are_not_understood_are_errors() {
        for (file, text) in [
            ("type", "four\n"),
            ("format/umask", "config9:8-15\n"),
            ("format/umask", "config:15-8\n"),
            ("format/umask", "8-15\n"),
            ("events/mem-loads", "event=0xzz\n"),
            ("events/mem-loads", "event=0xcd,frontend=1\n"),
        ] {
            let host = FakeHost::default();
            device(&host, "cpu", INTEL_FORMATS);
            device(
                &host,
                "cpu",
                &[("events/mem-loads", "event=0xcd,umask=0x1,ldlat=3\n")],
            );
            device(&host, "cpu", &[(file, text)]);
            let error = find_facility(&host).unwrap_err();
            assert!(error.contains("cpu"), "{file} {text}: {error}");
        }
    }

    /// Are values put correctly into fields that are split or begin at any bit?
    #[test]
    fn values_are_put_into_split_and_shifted_fields() {
        let host = FakeHost::default();
        device(
            &host,
            "x",
            &[
                ("format/event", "config:0-7,32-35\n"),
                ("format/wide", "config2:0-63\n"),
            ],
        );
        let config = encode(&host, "x", "event=0x1d6,wide=0xffffffffffffffff").unwrap();
        assert_eq!(config, Config([0x1_0000_00d6, 0, u64::MAX]));
    }

    /// Is a real ring of this kernel, filled by its CPU clock, read with the right thread, time and period?
    #[test]
    fn a_ring_of_this_kernel_is_read() {
        let clock = Facility {
            name: "CPU clock",
            kind: perf::bindings::PERF_TYPE_SOFTWARE,
            config: Config([u64::from(perf::bindings::PERF_COUNT_SW_CPU_CLOCK), 0, 0]),
            leader: None,
            precise_ip: 0,
            samples_kernel: false,
            period_step: 1,
            min_period: 1,
        };
        let period = clock.accepted_period(200_000);
        let mut sampler = PerfSampler::open(&clock, SamplingTarget::Thread(0), period).unwrap();
        let (mut read, mut word) = (RingContents::default(), 1u64);
        // The clock counts this thread's own time, so samples arrive however busy the host is.
        while read.unusable_count < 20 && read.samples.len() < 20 {
            (0..100_000).for_each(|_| word = std::hint::black_box(word.wrapping_mul(3)));
            sampler.drain(&mut read);
        }
        sampler.stop();
        // The clock's samples carry no address: all of them are counted, none is used.
        assert!(read.samples.is_empty(), "{read:?}");
        assert!(
            read.events >= 20 * period,
            "{} events by {} samples",
            read.events,
            read.unusable_count
        );
        assert_eq!(records::decode_source(0x0508_0021), DataSource::Unknown);
        assert!(PerfSampler::open(&clock, SamplingTarget::Thread(i32::MAX), period).is_err());
    }
}
