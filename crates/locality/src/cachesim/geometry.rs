//! The size and organization of a cache, checked for consistency.

use cachemate_core::FieldError;

/// Geometry of a set-associative cache, in lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheGeometry {
    /// Number of sets in one slice; any number is allowed.
    pub sets: u32,
    /// Number of lines in one set.
    pub ways: u32,
    /// Number of equal slices, chosen by a hash of the line address; 1 means not sliced.
    pub slices: u32,
}

/// Builds the error for an invalid field, or for `lines` if the product of all fields is too large.
pub(super) fn geometry_error(field: &str, found: u64, expected: &str) -> FieldError {
    FieldError::new(format!("cache {field}"), found, expected)
}

impl CacheGeometry {
    /// Builds the geometry of a cache of `size_bytes` in total.
    ///
    /// # Errors
    /// An argument is 0 or too large, or the size is not a whole number of sets.
    pub fn from_bytes(
        size_bytes: u64,
        line_bytes: u64,
        ways: u32,
        slices: u32,
    ) -> Result<Self, FieldError> {
        if line_bytes == 0 || !line_bytes.is_power_of_two() {
            return Err(geometry_error("line_bytes", line_bytes, "a power of two"));
        }
        if ways == 0 {
            return Err(geometry_error("ways", 0, "at least 1"));
        }
        if slices == 0 {
            return Err(geometry_error("slices", 0, "at least 1"));
        }
        let row_bytes = u128::from(line_bytes) * u128::from(ways) * u128::from(slices);
        if size_bytes == 0 || u128::from(size_bytes) % row_bytes != 0 {
            return Err(geometry_error(
                "size_bytes",
                size_bytes,
                "a multiple of line_bytes * ways * slices above 0",
            ));
        }
        let Ok(sets) = u32::try_from(u128::from(size_bytes) / row_bytes) else {
            return Err(geometry_error(
                "size_bytes",
                size_bytes,
                "fewer than 2^32 sets",
            ));
        };
        let geometry = CacheGeometry { sets, ways, slices };
        geometry.check().map(|()| geometry)
    }

    /// Builds the geometry of a fully associative cache.
    pub fn fully_associative(lines: u32) -> Self {
        CacheGeometry {
            sets: 1,
            ways: lines,
            slices: 1,
        }
    }

    /// Capacity of all slices in lines; `u64::MAX` if the product is larger.
    pub fn lines(&self) -> u64 {
        u64::from(self.sets)
            .saturating_mul(u64::from(self.ways))
            .saturating_mul(u64::from(self.slices))
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        for (field, found) in [
            ("sets", self.sets),
            ("ways", self.ways),
            ("slices", self.slices),
        ] {
            if found == 0 {
                return Err(geometry_error(field, 0, "at least 1"));
            }
        }
        if self.lines() > 1 << 32 {
            return Err(geometry_error("lines", self.lines(), "at most 2^32"));
        }
        Ok(())
    }
}
