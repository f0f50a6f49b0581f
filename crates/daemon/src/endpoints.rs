//! The addresses that the daemon serves besides its control socket: metrics and the dashboard.
//!
//! Problem: any user can listen at a port before the daemon does. Method: an endpoint whose address is in use is
//! reported, skipped, and retried periodically. Properties: the daemon starts and manages the host without the
//! endpoint; an address that can never be served (not of this host, no such directory) is an error at the start.

use std::io;
use std::time::{Duration, Instant};

use cachemate_core::RunHeader;
use cachemate_page::serve::page::{PageAddress, PageFeed, ServeError, serve};

use crate::metrics::{self, MetricsAddress};
use crate::socket::SharedStatus;

/// Time between two attempts.
const RETRY_PERIOD: Duration = Duration::from_secs(30);

/// Configured endpoints, whether or not they are served yet.
pub(crate) struct Endpoints {
    /// Address of the metrics while they are not served.
    pending_metrics: Option<MetricsAddress>,
    /// Address of the dashboard while it is not served.
    pending_page: Option<PageAddress>,
    /// The dashboard, if it is served.
    pub feed: Option<PageFeed>,
    /// Endpoints that are not served, each with the reason.
    pub unavailable: Vec<String>,
    next_attempt: Instant,
}

impl Endpoints {
    /// Serves each endpoint whose address is free.
    ///
    /// # Errors
    /// An address can never be served.
    pub fn open(
        metrics: Option<MetricsAddress>,
        page: Option<&PageAddress>,
        shared_status: &SharedStatus,
        header: &RunHeader,
        report: &dyn Fn(&str),
    ) -> anyhow::Result<Self> {
        let mut endpoints = Endpoints {
            pending_metrics: metrics,
            pending_page: page.cloned(),
            feed: None,
            unavailable: Vec::new(),
            next_attempt: Instant::now(),
        };
        endpoints.serve_pending(shared_status, header, report)?;
        let retry_text = format!(
            "going on without it, and trying again every {} s",
            RETRY_PERIOD.as_secs()
        );
        endpoints
            .unavailable
            .iter()
            .for_each(|reason| report(&format!("{reason}; {retry_text}")));
        Ok(endpoints)
    }

    /// Retries endpoints that are not served yet, unless the last attempt is too recent. Returns true if their state
    /// has changed.
    pub fn retry_unavailable(
        &mut self,
        shared_status: &SharedStatus,
        header: &RunHeader,
        report: &dyn Fn(&str),
    ) -> bool {
        if self.unavailable.is_empty() || Instant::now() < self.next_attempt {
            return false;
        }
        let previously_unavailable = self.unavailable.clone();
        if let Err(error) = self.serve_pending(shared_status, header, report) {
            // The address was valid at the start, so its failure does not end a daemon that manages the host.
            self.unavailable = vec![format!("{error:#}")];
        }
        self.unavailable != previously_unavailable
    }

    fn serve_pending(
        &mut self,
        shared_status: &SharedStatus,
        header: &RunHeader,
        report: &dyn Fn(&str),
    ) -> anyhow::Result<()> {
        self.next_attempt = Instant::now() + RETRY_PERIOD;
        self.unavailable.clear();
        if let Some(address) = &self.pending_metrics {
            match metrics::serve(address, shared_status.clone()) {
                Ok(bound_address) => {
                    report(&format!("metrics are at http://{bound_address}/metrics"));
                    self.pending_metrics = None;
                }
                Err(error) if is_address_in_use(&error) => {
                    self.unavailable.push(format!("no metrics: {error:#}"))
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(page) = &self.pending_page {
            match serve(page, header) {
                Ok(feed) => {
                    report(&format!("the page is at {}", feed.address));
                    (self.feed, self.pending_page) = (Some(feed), None);
                }
                Err(error) if error.is_taken() => {
                    self.unavailable.push(format!("no dashboard: {error}"))
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Does another process listen at the address?
fn is_address_in_use(error: &anyhow::Error) -> bool {
    let kinds = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .map(io::Error::kind);
    kinds
        .into_iter()
        .any(|kind| kind == io::ErrorKind::AddrInUse)
        || error
            .downcast_ref::<ServeError>()
            .is_some_and(ServeError::is_taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::CacheLevel;
    use cachemate_core::test_support::{
        capabilities_fixture, last_level_caches, pipeline_config, run_header,
    };
    use std::cell::RefCell;
    use std::net::TcpListener;

    fn sample_header() -> RunHeader {
        run_header(
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            capabilities_fixture(&[]),
            pipeline_config("default"),
        )
    }

    /// With both ports taken by another process: does the daemon continue, report it, and serve them once they are
    /// free?
    #[test]
    fn taken_ports_are_reported_and_served_once_free() {
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [metrics, page] = ports
            .each_ref()
            .map(|port| port.local_addr().unwrap().to_string());
        let (messages, shared, header) = (
            RefCell::new(Vec::new()),
            SharedStatus::default(),
            sample_header(),
        );
        let say = |text: &str| messages.borrow_mut().push(text.to_string());
        let page = PageAddress {
            address: page,
            requires_token: true,
        };
        let metrics_address = MetricsAddress {
            address: metrics.clone(),
            token: None,
        };
        let mut endpoints =
            Endpoints::open(Some(metrics_address), Some(&page), &shared, &header, &say).unwrap();
        assert_eq!(
            endpoints.unavailable.len(),
            2,
            "{:?}",
            endpoints.unavailable
        );
        assert!(endpoints.feed.is_none());
        assert!(
            messages.borrow()[0].contains(&metrics) && messages.borrow()[1].contains(&page.address),
            "{messages:?}"
        );
        assert!(
            !endpoints.retry_unavailable(&shared, &header, &say),
            "not at once"
        );
        drop(ports);
        endpoints.next_attempt = Instant::now();
        assert!(endpoints.retry_unavailable(&shared, &header, &say));
        assert!(endpoints.unavailable.is_empty() && endpoints.feed.is_some());
        assert!(
            messages
                .borrow()
                .iter()
                .any(|text| text.contains(&format!("http://{metrics}/metrics"))),
            "{messages:?}"
        );
    }

    /// Is an address that no host of the user could serve an error rather than retried forever?
    #[test]
    fn an_address_of_another_host_is_an_error() {
        let page = PageAddress {
            address: "0.0.0.0:0".into(),
            requires_token: true,
        };
        assert!(
            Endpoints::open(
                None,
                Some(&page),
                &SharedStatus::default(),
                &sample_header(),
                &|_| {}
            )
            .is_err()
        );
    }
}
