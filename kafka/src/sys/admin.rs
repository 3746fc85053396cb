//! Questions to the cluster: metadata, topic descriptions, configuration, creation of topics.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ptr;
use std::time::{Duration, Instant};

use rdkafka_sys as rdsys;

use super::client::{Client, Shared, millis, take_error};
use super::code::{Code, raw, text};
use crate::config::{Config, Role};
use crate::error::Error;

/// A client without group and transaction.
pub(crate) struct AdminClient {
    client: Client,
    start: Instant,
    timeout: Duration,
}

pub(crate) struct NativeCluster {
    pub(crate) cluster_id: String,
    pub(crate) broker_ids: Vec<i32>,
    pub(crate) topics: Vec<NativeTopic>,
}

pub(crate) struct NativeTopic {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) partitions: usize,
    /// Smallest number of replicas of a partition.
    pub(crate) replicas: usize,
    /// Whether this principal may write; unknown for a topic seen in the metadata only.
    pub(crate) may_write: Option<bool>,
    pub(crate) may_read: Option<bool>,
}

impl AdminClient {
    /// Creates the client and waits for an answer of some broker; the time-out is for everything it
    /// is asked.
    pub(crate) fn connect(config: &Config, timeout: Duration) -> Result<Self, Error> {
        let start = Instant::now();
        let client = Client::create(config, Role::Admin, &[], &[], Shared::default())?;
        client.connect(timeout)?;
        Ok(Self {
            client,
            start,
            timeout,
        })
    }

    fn left(&self) -> Duration {
        self.timeout
            .saturating_sub(self.start.elapsed())
            .max(Duration::from_millis(1))
    }

    /// Brokers and topics from the metadata.
    pub(crate) fn cluster(&self) -> Result<NativeCluster, Error> {
        const OPERATION: &str = "describe the cluster";
        // SAFETY: the handle is live; the results are freed here and not used afterwards. Arrays
        // are as long as their counts say.
        unsafe {
            let mut metadata = ptr::null();
            let rk = self.client.rk();
            let code = Code(raw::rd_kafka_metadata(
                rk,
                1,
                ptr::null_mut(),
                &raw mut metadata,
                millis(self.left()),
            ));
            if code.is_error() {
                return Err(self.client.explain_code(OPERATION, code, self.start, None));
            }
            let brokers = slice((*metadata).brokers, (*metadata).broker_cnt);
            let topics = slice((*metadata).topics, (*metadata).topic_cnt);
            let cluster = NativeCluster {
                cluster_id: String::new(),
                broker_ids: brokers.iter().map(|b| b.id).collect(),
                topics: topics
                    .iter()
                    .map(|t| {
                        let partitions = slice(t.partitions, t.partition_cnt);
                        let replicas = partitions
                            .iter()
                            .map(|p| usize::try_from(p.replica_cnt).unwrap_or(0))
                            .min();
                        NativeTopic {
                            name: text(t.topic),
                            id: String::new(),
                            partitions: partitions.len(),
                            replicas: replicas.unwrap_or(0),
                            may_write: None,
                            may_read: None,
                        }
                    })
                    .collect(),
            };
            rdsys::rd_kafka_metadata_destroy(metadata);
            let id = rdsys::rd_kafka_clusterid(rk, millis(self.left()));
            let cluster_id = text(id);
            if !id.is_null() {
                rdsys::rd_kafka_mem_free(rk, id.cast());
            }
            Ok(NativeCluster {
                cluster_id,
                ..cluster
            })
        }
    }

    /// Describes one topic; `None` = it does not exist.
    pub(crate) fn topic(&self, name: &str) -> Result<Option<NativeTopic>, Error> {
        let operation = format!("describe the topic `{name}`");
        let c_name = c_string("topic", name)?;
        // SAFETY: the collection is ours; the result is borrowed from the event, which is freed by
        // `ask` after the closure.
        unsafe {
            let mut names = [c_name.as_ptr()];
            let topics = rdsys::rd_kafka_TopicCollection_of_topic_names(names.as_mut_ptr(), 1);
            let result = self.ask(
                &operation,
                rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS,
                |rk, options, queue| rdsys::rd_kafka_DescribeTopics(rk, topics, options, queue),
                |event| {
                    let result = rdsys::rd_kafka_event_DescribeTopics_result(event);
                    let mut count = 0;
                    let all = rdsys::rd_kafka_DescribeTopics_result_topics(result, &raw mut count);
                    if count == 0 {
                        return Ok(None);
                    }
                    let topic = *all;
                    let error = rdsys::rd_kafka_TopicDescription_error(topic);
                    let code = if error.is_null() {
                        Code::NONE
                    } else {
                        Code(raw::rd_kafka_error_code(error))
                    };
                    if code == Code::UNKNOWN_TOPIC_OR_PART {
                        return Ok(None);
                    }
                    if code.is_error() {
                        return Err(self.client.explain_code(
                            &operation,
                            code,
                            self.start,
                            Some(name),
                        ));
                    }
                    Ok(Some(describe(topic)))
                },
            );
            rdsys::rd_kafka_TopicCollection_destroy(topics);
            result
        }
    }

    /// Creates a topic; `false` = it exists already. A replication of −1 is the broker's default.
    pub(crate) fn create_topic(
        &self,
        name: &str,
        partitions: i32,
        replication: i16,
        properties: &BTreeMap<String, String>,
    ) -> Result<bool, Error> {
        let operation = format!("create the topic `{name}`");
        let c_name = c_string("topic", name)?;
        let properties: Vec<(CString, CString)> = properties
            .iter()
            .map(|(k, v)| Ok((c_string(k, k)?, c_string(k, v)?)))
            .collect::<Result<_, Error>>()?;
        let mut words = [0; 512];
        // SAFETY: the topic object is ours until destroyed below; the result is borrowed from the
        // event as in `topic`.
        unsafe {
            let topic = rdsys::rd_kafka_NewTopic_new(
                c_name.as_ptr(),
                partitions,
                replication.into(),
                words.as_mut_ptr(),
                words.len(),
            );
            if topic.is_null() {
                return Err(Error::config(
                    "topic",
                    format!("`{name}` is refused: {}", text(words.as_ptr())),
                ));
            }
            for (key, value) in &properties {
                rdsys::rd_kafka_NewTopic_set_config(topic, key.as_ptr(), value.as_ptr());
            }
            let mut topics = [topic];
            let result = self.ask(
                &operation,
                rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_CREATETOPICS,
                |rk, options, queue| {
                    rdsys::rd_kafka_CreateTopics(rk, topics.as_mut_ptr(), 1, options, queue)
                },
                |event| {
                    let result = rdsys::rd_kafka_event_CreateTopics_result(event);
                    let mut count = 0;
                    let all = rdsys::rd_kafka_CreateTopics_result_topics(result, &raw mut count);
                    let one = (count > 0).then(|| *all);
                    let code =
                        one.map_or(Code::NONE, |r| Code(raw::rd_kafka_topic_result_error(r)));
                    if code == Code::TOPIC_ALREADY_EXISTS {
                        return Ok(false);
                    }
                    if code.is_error() {
                        let error = super::CallError {
                            code,
                            reason: one.map_or_else(String::new, |r| {
                                text(rdsys::rd_kafka_topic_result_error_string(r))
                            }),
                            flags: crate::classify::Flags::default(),
                        };
                        return Err(self.client.explain(
                            &operation,
                            &error,
                            self.start,
                            Some(name),
                        ));
                    }
                    Ok(true)
                },
            );
            rdsys::rd_kafka_NewTopic_destroy(topic);
            result
        }
    }

    /// Deletes a topic; `false` = there is none.
    pub(crate) fn delete_topic(&self, name: &str) -> Result<bool, Error> {
        let operation = format!("delete the topic `{name}`");
        let c_name = c_string("topic", name)?;
        // SAFETY: the topic object is ours until destroyed below; the result is borrowed from the
        // event as in `topic`.
        unsafe {
            let topic = rdsys::rd_kafka_DeleteTopic_new(c_name.as_ptr());
            let mut topics = [topic];
            let result = self.ask(
                &operation,
                rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DELETETOPICS,
                |rk, options, queue| {
                    rdsys::rd_kafka_DeleteTopics(rk, topics.as_mut_ptr(), 1, options, queue)
                },
                |event| {
                    let result = rdsys::rd_kafka_event_DeleteTopics_result(event);
                    let mut count = 0;
                    let all = rdsys::rd_kafka_DeleteTopics_result_topics(result, &raw mut count);
                    let one = (count > 0).then(|| *all);
                    let code =
                        one.map_or(Code::NONE, |r| Code(raw::rd_kafka_topic_result_error(r)));
                    if code == Code::UNKNOWN_TOPIC_OR_PART {
                        return Ok(false);
                    }
                    if code.is_error() {
                        let error = super::CallError {
                            code,
                            reason: one.map_or_else(String::new, |r| {
                                text(rdsys::rd_kafka_topic_result_error_string(r))
                            }),
                            flags: crate::classify::Flags::default(),
                        };
                        return Err(self.client.explain(
                            &operation,
                            &error,
                            self.start,
                            Some(name),
                        ));
                    }
                    Ok(true)
                },
            );
            rdsys::rd_kafka_DeleteTopic_destroy(topic);
            result
        }
    }

    /// The configuration of a topic.
    pub(crate) fn topic_config(&self, name: &str) -> Result<BTreeMap<String, String>, Error> {
        self.describe_config(
            rdsys::rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_TOPIC,
            name,
        )
    }

    /// The configuration of a broker.
    pub(crate) fn broker_config(&self, id: i32) -> Result<BTreeMap<String, String>, Error> {
        self.describe_config(
            rdsys::rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_BROKER,
            &id.to_string(),
        )
    }

    fn describe_config(
        &self,
        kind: rdsys::rd_kafka_ResourceType_t,
        name: &str,
    ) -> Result<BTreeMap<String, String>, Error> {
        let operation = format!("read the configuration of `{name}`");
        let c_name = c_string("name", name)?;
        // SAFETY: the resource is ours until destroyed below; the result is borrowed from the event
        // as in `topic`.
        unsafe {
            let resource = rdsys::rd_kafka_ConfigResource_new(kind, c_name.as_ptr());
            let mut resources = [resource];
            let result = self.ask(
                &operation,
                rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS,
                |rk, options, queue| {
                    rdsys::rd_kafka_DescribeConfigs(rk, resources.as_mut_ptr(), 1, options, queue)
                },
                |event| {
                    let result = rdsys::rd_kafka_event_DescribeConfigs_result(event);
                    let mut count = 0;
                    let all =
                        rdsys::rd_kafka_DescribeConfigs_result_resources(result, &raw mut count);
                    if count == 0 {
                        return Ok(BTreeMap::new());
                    }
                    let one = *all;
                    let code = Code(raw::rd_kafka_ConfigResource_error(one));
                    if code.is_error() {
                        let error = super::CallError {
                            code,
                            reason: text(rdsys::rd_kafka_ConfigResource_error_string(one)),
                            flags: crate::classify::Flags::default(),
                        };
                        return Err(self.client.explain(
                            &operation,
                            &error,
                            self.start,
                            Some(name),
                        ));
                    }
                    let mut entries = 0;
                    let list = rdsys::rd_kafka_ConfigResource_configs(one, &raw mut entries);
                    Ok((0..entries)
                        .map(|i| {
                            let entry = *list.add(i);
                            (
                                text(rdsys::rd_kafka_ConfigEntry_name(entry)),
                                text(rdsys::rd_kafka_ConfigEntry_value(entry)),
                            )
                        })
                        .collect())
                },
            );
            rdsys::rd_kafka_ConfigResource_destroy(resource);
            result
        }
    }

    /// One admin request and its answer.
    fn ask<T>(
        &self,
        operation: &str,
        op: rdsys::rd_kafka_admin_op_t,
        send: impl FnOnce(
            *mut rdsys::rd_kafka_t,
            *const rdsys::rd_kafka_AdminOptions_t,
            *mut rdsys::rd_kafka_queue_t,
        ),
        read: impl FnOnce(*mut rdsys::rd_kafka_event_t) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // SAFETY: queue, options and event are ours and freed here, in the reverse order.
        unsafe {
            let rk = self.client.rk();
            let queue = rdsys::rd_kafka_queue_new(rk);
            let options = rdsys::rd_kafka_AdminOptions_new(rk, op);
            let timeout = millis(self.left());
            let mut words = [0; 512];
            rdsys::rd_kafka_AdminOptions_set_request_timeout(
                options,
                timeout,
                words.as_mut_ptr(),
                words.len(),
            );
            if op == rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS {
                let _ = take_error(
                    rdsys::rd_kafka_AdminOptions_set_include_authorized_operations(options, 1),
                );
            }
            if op == rdsys::rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_CREATETOPICS {
                // The answer comes when the topic is there, not when it has been asked for.
                rdsys::rd_kafka_AdminOptions_set_operation_timeout(
                    options,
                    timeout,
                    words.as_mut_ptr(),
                    words.len(),
                );
            }
            send(rk, options, queue);
            // The request has a time-out of its own; a little more, so that its error is what we
            // see.
            let event = rdsys::rd_kafka_queue_poll(queue, timeout.saturating_add(1_000));
            self.client.poll(Duration::ZERO);
            let result = if event.is_null() {
                Err(self
                    .client
                    .explain_code(operation, Code::LOCAL_TIMED_OUT, self.start, None))
            } else {
                let code = Code(raw::rd_kafka_event_error(event));
                if code.is_error() {
                    let error = super::CallError {
                        code,
                        reason: text(rdsys::rd_kafka_event_error_string(event)),
                        flags: crate::classify::Flags::default(),
                    };
                    Err(self.client.explain(operation, &error, self.start, None))
                } else {
                    read(event)
                }
            };
            if !event.is_null() {
                rdsys::rd_kafka_event_destroy(event);
            }
            rdsys::rd_kafka_AdminOptions_destroy(options);
            rdsys::rd_kafka_queue_destroy(queue);
            result
        }
    }
}

/// # Safety
/// `topic` is live during the call.
unsafe fn describe(topic: *const rdsys::rd_kafka_TopicDescription_t) -> NativeTopic {
    // SAFETY: everything returned is borrowed from `topic` and copied here; arrays are as long as
    // their counts say.
    unsafe {
        let mut partitions = 0;
        let list = rdsys::rd_kafka_TopicDescription_partitions(topic, &raw mut partitions);
        let replicas = (0..partitions)
            .map(|i| {
                let mut count = 0;
                rdsys::rd_kafka_TopicPartitionInfo_replicas(*list.add(i), &raw mut count);
                count
            })
            .min();
        let mut count = 0;
        let operations =
            rdsys::rd_kafka_TopicDescription_authorized_operations(topic, &raw mut count);
        // Read as integers: a newer broker may know more operations than the binding.
        let may = |operation: rdsys::rd_kafka_AclOperation_t| {
            (!operations.is_null()).then(|| {
                (0..count).any(|i| operations.cast::<u32>().add(i).read() == operation as u32)
            })
        };
        let id = rdsys::rd_kafka_TopicDescription_topic_id(topic);
        NativeTopic {
            name: text(rdsys::rd_kafka_TopicDescription_name(topic)),
            id: if id.is_null() {
                String::new()
            } else {
                text(rdsys::rd_kafka_Uuid_base64str(id))
            },
            partitions,
            replicas: replicas.unwrap_or(0),
            may_write: may(rdsys::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE),
            may_read: may(rdsys::rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_READ),
        }
    }
}

/// # Safety
/// `first` points to `count` elements that live as long as the result, or `count` is 0.
unsafe fn slice<'a, T>(first: *const T, count: i32) -> &'a [T] {
    match usize::try_from(count) {
        // SAFETY: by this function's contract.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(first, count) },
        _ => &[],
    }
}

fn c_string(property: &str, value: &str) -> Result<CString, Error> {
    CString::new(value).map_err(|_| Error::config(property, "contains a NUL byte"))
}
