//! Animal classes of programs (Xie and Loh 2008; CA 2.2.2).
//!
//! A turtle makes little use of the shared cache. A sheep has few misses and is insensitive to its number of ways. A
//! rabbit has few misses and is sensitive to its number of ways. A devil has many misses. The papers do not give
//! numbers, so the thresholds are our own choice; [`AnimalThresholds`] lets users change them.

/// Boundaries between the classes, in events per million instructions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AnimalThresholds {
    /// A program with fewer accesses to the cache is a turtle.
    pub turtle_refs_below: f64,
    /// A program with at least this many misses, alone on the cache, is a devil.
    pub min_devil_misses: f64,
    /// A program with at least this many additional misses on half of the ways is a rabbit; all others are sheep.
    pub rabbit_extra_misses_from: f64,
}

impl Default for AnimalThresholds {
    /// Boundaries of 1 access, 4 misses and 1 additional miss per thousand instructions.
    fn default() -> Self {
        AnimalThresholds {
            turtle_refs_below: 1000.0,
            min_devil_misses: 4000.0,
            rabbit_extra_misses_from: 1000.0,
        }
    }
}

/// The class of a program by its use of a shared cache.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Animal {
    /// Hardly uses the shared cache.
    Turtle,
    /// Uses the cache, but misses little more with fewer ways.
    Sheep,
    /// Has few misses, but many more with half of the ways.
    Rabbit,
    /// Has many misses, whatever its share.
    Devil,
}

impl Animal {
    /// In lower case, as reports and profiles write it.
    pub fn name(self) -> &'static str {
        match self {
            Animal::Turtle => "turtle",
            Animal::Sheep => "sheep",
            Animal::Rabbit => "rabbit",
            Animal::Devil => "devil",
        }
    }
}

/// `positions` holds the hits at the LRU positions 1..=ways, followed by the misses, all per million instructions.
/// `None` if there are no hit positions.
pub fn classify(positions: &[f64], thresholds: &AnimalThresholds) -> Option<Animal> {
    let (misses, hits) = positions
        .split_last()
        .filter(|(_, hits)| !hits.is_empty())?;
    let refs = misses + hits.iter().sum::<f64>();
    let half_ways = hits.len().div_ceil(2);
    let extra_misses: f64 = hits[half_ways..].iter().sum();
    Some(if refs < thresholds.turtle_refs_below {
        Animal::Turtle
    } else if *misses >= thresholds.min_devil_misses {
        Animal::Devil
    } else if extra_misses >= thresholds.rabbit_extra_misses_from {
        Animal::Rabbit
    } else {
        Animal::Sheep
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is each kind of behavior assigned to its class?
    #[test]
    fn behaviors_get_their_classes() {
        let classify_positions =
            |positions: &[f64]| classify(positions, &AnimalThresholds::default());
        assert_eq!(
            classify_positions(&[400.0, 100.0, 100.0, 100.0, 200.0]),
            Some(Animal::Turtle)
        );
        assert_eq!(
            classify_positions(&[90_000.0, 5000.0, 400.0, 100.0, 200.0]),
            Some(Animal::Sheep)
        );
        assert_eq!(
            classify_positions(&[3000.0, 3000.0, 3000.0, 3000.0, 200.0]),
            Some(Animal::Rabbit)
        );
        assert_eq!(
            classify_positions(&[3000.0, 3000.0, 3000.0, 3000.0, 4000.0]),
            Some(Animal::Devil)
        );
        assert_eq!(
            (classify_positions(&[]), classify_positions(&[7.0])),
            (None, None)
        );
    }
}
