//! Loads and attaches the BPF object, updates its plan, and reads its state. When this value is dropped, or its
//! process ends in any way, the kernel detaches the object, and all tasks run under the fair class.

use crate::machine::HostCaches;
use gangs::maps::{self, CacheCounts, MAX_CACHES, MapTurn};
use gangs::plan::CheckedPlan;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};
use std::collections::HashMap;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/gangs.bpf.o"));
/// Key of the only element of an array map.
const ONLY: u32 = 0;

pub struct BpfScheduler {
    // This field precedes the object, so that the link is dropped first.
    _link: Link,
    _object: Object,
    maps: HashMap<String, MapHandle>,
    cpus: usize,
    caches: usize,
}

impl BpfScheduler {
    /// Attaches the scheduler: to every task of the host if `schedules_all`, and otherwise to tasks with policy 7
    /// (SCHED_EXT).
    ///
    /// # Errors
    /// The kernel refuses the scheduler.
    pub fn attach(machine: &HostCaches, schedules_all: bool) -> Result<Self, String> {
        let describe_error =
            |subject: &str, error: libbpf_rs::Error| format!("{subject}: {error:#}");
        let aligned_object = OBJECT.to_vec();
        let mut builder = ObjectBuilder::default();
        let mut open_object = builder
            .open_memory(&aligned_object)
            .map_err(|error| describe_error("the BPF object", error))?;
        let (operations, unused_operations) = if schedules_all {
            ("gangs_all", "gangs_managed")
        } else {
            ("gangs_managed", "gangs_all")
        };
        for mut map in open_object.maps_mut() {
            if map.name() == unused_operations {
                map.set_autocreate(false)
                    .map_err(|error| describe_error(unused_operations, error))?;
            }
        }
        let mut object = open_object
            .load()
            .map_err(|error| describe_error("the kernel refuses the BPF object", error))?;
        let mut handles = HashMap::new();
        for map in object.maps().filter(|map| map.name() != unused_operations) {
            let name = map.name().to_string_lossy().into_owned();
            handles.insert(
                name,
                MapHandle::try_from(&map).map_err(|error| describe_error("a map", error))?,
            );
        }
        let (cpus, caches) = (machine.cache_of_cpu.len(), machine.cpus_of_cache.len());
        write(
            &handles,
            "machine",
            ONLY,
            &maps::machine_to_bytes(cpus as u32, caches as u32),
        )?;
        for (cpu, cache) in machine.cache_of_cpu.iter().enumerate() {
            write(&handles, "cpus", cpu as u32, &maps::cpu_to_bytes(*cache))?;
        }
        let mut operations_map = object.maps_mut().find(|map| map.name() == operations);
        let map = operations_map
            .as_mut()
            .ok_or_else(|| format!("{operations}: not in the BPF object"))?;
        let link = map
            .attach_struct_ops()
            .map_err(|error| describe_error("the kernel refuses the scheduler", error))?;
        Ok(BpfScheduler {
            _link: link,
            _object: object,
            maps: handles,
            cpus,
            caches,
        })
    }

    /// Loads a plan: fills the half of the maps that is not in force, and then switches to it by writing one word.
    ///
    /// # Errors
    /// The kernel refuses a write to a map; the plan in force stays unchanged.
    pub fn load_plan(&self, plan: &CheckedPlan) -> Result<(), String> {
        // This count differs from the plan's own generation, because its lowest bit selects the half in force.
        let generation = self.generation()? + 1;
        let parity = generation & 1;
        let places = map(
            &self.maps,
            if parity == 1 {
                "places_odd"
            } else {
                "places_even"
            },
        )?;
        for key in places.keys().collect::<Vec<_>>() {
            places
                .delete(&key)
                .map_err(|error| format!("places: {error}"))?;
        }
        for (task_key, place) in &plan.places {
            places
                .update(&task_key.to_bytes(), &place.to_bytes(), MapFlags::ANY)
                .map_err(|error| format!("{task_key:?}: {error}"))?;
        }
        for (cache, rotation) in plan.rotations.iter().enumerate() {
            let key = parity as usize * MAX_CACHES + cache;
            write(
                &self.maps,
                "rotations",
                key as u32,
                &maps::rotation_to_bytes(rotation),
            )?;
        }
        write(&self.maps, "generation", ONLY, &generation.to_ne_bytes())
    }

    /// Number of plans loaded since attaching.
    ///
    /// # Errors
    /// A map cannot be read. The same applies to the functions below.
    fn generation(&self) -> Result<u64, String> {
        let bytes = read(&self.maps, "generation", ONLY)?;
        bytes
            .try_into()
            .map(u64::from_ne_bytes)
            .map_err(|_| "generation: not a word".to_owned())
    }

    /// Turns in force, by cache.
    pub fn rotations(&self) -> Result<Vec<Vec<MapTurn>>, String> {
        let parity = (self.generation()? & 1) as usize;
        (0..self.caches)
            .map(|cache| {
                let bytes = read(
                    &self.maps,
                    "rotations",
                    (parity * MAX_CACHES + cache) as u32,
                )?;
                maps::rotation_from_bytes(&bytes)
                    .ok_or_else(|| format!("rotations[{cache}]: not a rotation"))
            })
            .collect()
    }

    /// Number of tasks that the plan in force names.
    pub fn places(&self) -> Result<usize, String> {
        let is_odd = self.generation()? & 1 == 1;
        Ok(map(
            &self.maps,
            if is_odd { "places_odd" } else { "places_even" },
        )?
        .keys()
        .count())
    }

    /// Counters since attaching, by cache.
    pub fn counts(&self) -> Result<Vec<CacheCounts>, String> {
        let read_cache = |cache| {
            CacheCounts::from_bytes(&read(&self.maps, "caches", cache)?)
                .ok_or_else(|| "caches: too short".to_owned())
        };
        (0..self.caches as u32).map(read_cache).collect()
    }

    /// Time in ns for which a higher class has had each CPU.
    pub fn stolen_times_ns(&self, now_ns: u64) -> Result<Vec<u64>, String> {
        let read_cpu = |cpu| {
            maps::stolen_time_ns(&read(&self.maps, "cpus", cpu)?, now_ns)
                .ok_or_else(|| "cpus: too short".to_owned())
        };
        (0..self.cpus as u32).map(read_cpu).collect()
    }

    /// Kind and code of the end, if the kernel has ended the scheduler.
    pub fn read_exit(&self) -> Result<Option<(u32, i64)>, String> {
        let exit =
            maps::exit_state(&read(&self.maps, "machine", ONLY)?).ok_or("machine: too short")?;
        Ok((exit.0 != 0).then_some(exit))
    }
}

fn map<'a>(maps: &'a HashMap<String, MapHandle>, name: &str) -> Result<&'a MapHandle, String> {
    maps.get(name)
        .ok_or_else(|| format!("{name}: not in the BPF object"))
}

fn read(maps: &HashMap<String, MapHandle>, name: &str, key: u32) -> Result<Vec<u8>, String> {
    let value = map(maps, name)?.lookup(&key.to_ne_bytes(), MapFlags::ANY);
    value
        .map_err(|error| format!("{name}[{key}]: {error}"))?
        .ok_or_else(|| format!("{name}[{key}]: absent"))
}

fn write(
    maps: &HashMap<String, MapHandle>,
    name: &str,
    key: u32,
    value: &[u8],
) -> Result<(), String> {
    map(maps, name)?
        .update(&key.to_ne_bytes(), value, MapFlags::ANY)
        .map_err(|error| format!("{name}[{key}]: {error}"))
}
