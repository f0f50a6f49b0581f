//! Which part of a control group's path root has chosen.
//!
//! Problem: a service is known by the name of its group, and a user to whom a group was delegated names the groups in
//! it as she likes: `docker-ID.scope` with another container's id. Method: a name counts if it stands in a group that
//! belongs to root, because only root can have made it; everything deeper is cut off. Property: on a host that shows no
//! hierarchy nobody can make groups either, so the path counts as it is.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::kernel::Kernel;
use crate::kernel::text_files::{GroupHierarchy, group_hierarchies};

/// Knowledge of the owners of groups, for one refresh.
pub(crate) struct GroupTrust<'a> {
    kernel: &'a dyn Kernel,
    hierarchies: OnceCell<Vec<GroupHierarchy>>,
    root_owned: RefCell<BTreeMap<PathBuf, bool>>,
}

impl<'a> GroupTrust<'a> {
    pub(crate) fn new(kernel: &'a dyn Kernel) -> Self {
        GroupTrust {
            kernel,
            hierarchies: OnceCell::new(),
            root_owned: RefCell::default(),
        }
    }

    /// The text of `/proc/PID/cgroup` with the paths cut after the first group that does not belong to root.
    pub(crate) fn cut_to_trusted(&self, cgroup_text: &str) -> String {
        let mut trusted_text = String::new();
        for line in cgroup_text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(id), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let path = self.trusted_path(controllers, path);
            trusted_text.push_str(&format!("{id}:{controllers}:{path}\n"));
        }
        trusted_text
    }

    fn trusted_path(&self, controllers: &str, path: &str) -> String {
        let Some(mount) = self.mount_of(controllers) else {
            return path.to_string();
        };
        let (mut group, mut trusted_path) = (mount.to_path_buf(), String::new());
        for name in path.split('/').filter(|name| !name.is_empty()) {
            if !self.is_root_owned(&group) {
                break;
            }
            group.push(name);
            trusted_path.push('/');
            trusted_path.push_str(name);
        }
        if trusted_path.is_empty() {
            trusted_path.push('/');
        }
        trusted_path
    }

    fn is_root_owned(&self, group: &Path) -> bool {
        if let Some(known) = self.root_owned.borrow().get(group) {
            return *known;
        }
        let is_root_owned = self.kernel.owner(group).is_ok_and(|owner| owner == 0);
        self.root_owned
            .borrow_mut()
            .insert(group.to_path_buf(), is_root_owned);
        is_root_owned
    }

    fn mount_of(&self, controllers: &str) -> Option<&Path> {
        let hierarchies = self
            .hierarchies
            .get_or_init(|| group_hierarchies(self.kernel).unwrap_or_default());
        let wanted: Vec<&str> = controllers.split(',').filter(|c| !c.is_empty()).collect();
        let hierarchy = hierarchies.iter().find(|hierarchy| {
            let offered = &hierarchy.controllers;
            wanted.is_empty() == hierarchy.is_v2()
                && wanted
                    .iter()
                    .all(|controller| offered.iter().any(|offer| offer == controller))
        })?;
        Some(&hierarchy.mount)
    }
}
