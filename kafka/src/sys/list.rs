//! librdkafka's list of partitions, which never leaves this module: a list obtained from a consumer
//! that outlives it makes the consumer's destruction hang for ever.

use std::ffi::CString;

use rdkafka_sys as rdsys;

use super::code::{Code, text};

/// An owned list.
pub(super) struct List(*mut rdsys::rd_kafka_topic_partition_list_t);

/// One element, copied out.
pub(super) struct Element {
    pub(super) topic: String,
    pub(super) partition: i32,
    pub(super) offset: i64,
    pub(super) metadata: String,
    pub(super) code: Code,
}

impl List {
    pub(super) fn new(capacity: usize) -> Self {
        // SAFETY: no preconditions.
        Self(unsafe {
            rdsys::rd_kafka_topic_partition_list_new(i32::try_from(capacity).unwrap_or(0))
        })
    }

    /// Adds an element; −1001 is librdkafka's "no offset". A topic name with a NUL byte cannot
    /// exist: it is refused.
    pub(super) fn add(
        &mut self,
        topic: &str,
        partition: i32,
        offset: i64,
        metadata: &str,
    ) -> Result<(), Code> {
        let topic = CString::new(topic).map_err(|_| Code::TOPIC_EXCEPTION)?;
        // SAFETY: the list is live; the element stays where it is until the next `add`. The
        // metadata is allocated with the allocator that librdkafka frees it with.
        unsafe {
            let element =
                rdsys::rd_kafka_topic_partition_list_add(self.0, topic.as_ptr(), partition);
            (*element).offset = offset;
            if !metadata.is_empty() {
                let copy = rdsys::rd_kafka_mem_malloc(std::ptr::null_mut(), metadata.len());
                std::ptr::copy_nonoverlapping(metadata.as_ptr(), copy.cast(), metadata.len());
                (*element).metadata = copy;
                (*element).metadata_size = metadata.len();
            }
        }
        Ok(())
    }

    pub(super) fn of(
        partitions: impl ExactSizeIterator<Item = (impl AsRef<str>, i32, i64)>,
    ) -> Result<Self, Code> {
        let mut list = Self::new(partitions.len());
        for (topic, partition, offset) in partitions {
            list.add(topic.as_ref(), partition, offset, "")?;
        }
        Ok(list)
    }

    pub(super) fn ptr(&self) -> *mut rdsys::rd_kafka_topic_partition_list_t {
        self.0
    }

    pub(super) fn elements(&self) -> Vec<Element> {
        // SAFETY: live and not modified during the call.
        unsafe { elements(self.0) }
    }

    /// The first element's error, if one has an error.
    pub(super) fn first_error(&self) -> Option<Code> {
        self.elements()
            .into_iter()
            .map(|e| e.code)
            .find(|code| code.is_error())
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: owned, last use.
        unsafe { rdsys::rd_kafka_topic_partition_list_destroy(self.0) };
    }
}

/// Copies the elements of a list out.
///
/// # Safety
/// `list` is live during the call.
pub(super) unsafe fn elements(list: *const rdsys::rd_kafka_topic_partition_list_t) -> Vec<Element> {
    // SAFETY: `elems` holds `cnt` elements. The error is read as an integer: it may be a code the
    // binding does not know.
    unsafe {
        (0..usize::try_from((*list).cnt).unwrap_or(0))
            .map(|i| {
                let e = (*list).elems.add(i);
                let metadata = if (*e).metadata.is_null() {
                    String::new()
                } else {
                    let bytes =
                        std::slice::from_raw_parts((*e).metadata.cast::<u8>(), (*e).metadata_size);
                    String::from_utf8_lossy(bytes).into_owned()
                };
                Element {
                    topic: text((*e).topic),
                    partition: (*e).partition,
                    offset: (*e).offset,
                    metadata,
                    code: Code((&raw const (*e).err).cast::<i32>().read()),
                }
            })
            .collect()
    }
}
